"""Receipts: what makes a message handled once. A message has the id of its receipt, and is found by it.

The receipt outlives the message, whose history is dropped earlier.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from django.db import connections, transaction
from django.db.models import QuerySet

from exactly_once.sql.connections import fetch
from exactly_once.sql.days import LIVE, Today
from exactly_once.sql.now import DatabaseTime
from exactly_once.sql.partitions import days_by, soon_after
from inbox.models import InboxMessage, Receipt
from inbox.states import SETTLED
from inbox.store.dialect import RECEIPTS, TABLE
from inbox.store.message_rows import NewRow

ID_OF = f"(SELECT id FROM {RECEIPTS} WHERE handler = %s AND topic = %s AND biz_id = %s)"
"""The id of a message by what it is deduplicated on: see `name_of`."""


def name_of(row: NewRow) -> list[str]:
    """The parameters of `ID_OF`."""
    return [row.handler, row.topic, row.biz_id]


def named(alias: str, handler: str, topic: str, biz_id: str) -> QuerySet[InboxMessage]:
    """The message with this name."""
    receipt = Receipt.objects.using(alias).filter(handler=handler, topic=topic, biz_id=biz_id).only("pk").first()
    return InboxMessage.objects.using(alias).none() if receipt is None else message(alias, receipt.pk)


def message(alias: str, pk: int) -> QuerySet[InboxMessage]:
    """The message of this receipt, open or settled."""
    rows = InboxMessage.objects.using(alias)
    day = days_of(alias, [pk]).get(pk)
    return rows.none() if day is None else rows.filter(pk=pk, day=day)


def days_of(alias: str, pks: Sequence[int]) -> dict[int, int]:
    """The days of the messages of these receipts, as far as they exist: most are settled soon after they are received."""
    instants = Receipt.objects.using(alias).filter(pk__in=pks).values_list("received_at", "retried_at")
    likely = {day for instant in chain(*instants) if instant for day in soon_after(instant)}
    return days_by(InboxMessage.objects.using(alias), "pk", pks, likely)


def open_message(alias: str, row: NewRow) -> QuerySet[InboxMessage]:
    """The message that this delivery has, or is a duplicate of, if it is open."""
    handler, topic, biz_id = name_of(row)
    ids = Receipt.objects.using(alias).filter(handler=handler, topic=topic, biz_id=biz_id).values("pk")
    return InboxMessage.objects.using(alias).filter(pk__in=ids, day=LIVE)


class TaskOutcome(NamedTuple):
    """The outcome of a Celery task.

    Attributes:
        result: what it returned, as JSON; None if that is unknown.
    """

    state: str
    result: str | None
    last_error: str


def outcome_of_task(alias: str, row: NewRow) -> TaskOutcome | None:
    """The outcome of the task that `row` repeats; None if it was deleted. One without history is taken to be done."""
    ids = [pk for (pk,) in fetch(connections[alias], f"SELECT {ID_OF}", name_of(row)) if pk]
    days = ", ".join(map(str, {LIVE, *days_of(alias, ids).values()}))
    sql = (
        "SELECT COALESCE(m.state, 'done'), CAST(m.result AS text), COALESCE(m.last_error, '') "
        f"FROM {RECEIPTS} r LEFT JOIN {TABLE} m ON m.id = r.id AND m.day IN ({days}) WHERE r.id = %s"
    )
    return next((TaskOutcome(*found) for pk in ids for found in fetch(connections[alias], sql, [pk])), None)


def create(alias: str, **columns: Any) -> InboxMessage:
    """Insert a message with these columns, and its receipt, in the open transaction.

    Raises:
        django.db.IntegrityError: there is one of this name.
    """
    columns = {"received_at": DatabaseTime(), **({"day": Today()} if columns.get("state") in SETTLED else {}), **columns}
    copied = {name: columns[name] for name in COPIED if name in columns}
    receipt = Receipt.objects.using(alias).create(**copied)
    return InboxMessage.objects.using(alias).create(pk=receipt.pk, **columns)


COPIED = ["handler", "topic", "biz_id", "message_id", "digest", "received_at"]
"""The columns of a receipt that its message has as well."""


def delete(alias: str, condition: str, parameters: Sequence[Any], *, returning: str = "id") -> list[Any]:
    """Delete messages that shall leave no trace, with their receipts; what is returned of each."""
    with transaction.atomic(using=alias):
        deleted = fetch(connections[alias], f"DELETE FROM {TABLE} WHERE {condition} RETURNING id, {returning}", parameters)
        if deleted:
            sql = f"DELETE FROM {RECEIPTS} WHERE id IN ({', '.join(['%s'] * len(deleted))}) RETURNING id"
            fetch(connections[alias], sql, [row for row, _ in deleted])
    return [returned for _, returned in deleted]


_PAIRS = {
    "postgresql": (
        "WITH RECURSIVE pairs AS ("
        f"(SELECT r.handler, r.topic FROM {RECEIPTS} r ORDER BY r.handler, r.topic LIMIT 1) UNION ALL "
        f"SELECT following.* FROM pairs, LATERAL (SELECT r.handler, r.topic FROM {RECEIPTS} r "
        "WHERE (r.handler, r.topic) > (pairs.handler, pairs.topic) ORDER BY r.handler, r.topic LIMIT 1) following"
        ") SELECT handler, topic FROM pairs LIMIT %s"
    ),
    "sqlite": f"SELECT DISTINCT r.handler, r.topic FROM {RECEIPTS} r ORDER BY r.handler, r.topic LIMIT %s",
}
"""On PostgreSQL a loose index scan: one index lookup for each pair, not for each message."""


def handlers_with_topics(alias: str, most: int = 10_000) -> list[tuple[str, str]]:
    """The handlers of all messages with their topics, up to a limit."""
    return fetch(connections[alias], _PAIRS[connections[alias].vendor], [most])
