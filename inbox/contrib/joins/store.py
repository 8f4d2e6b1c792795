"""All SQL of joins: runs, their parts, and the due time of their inbox rows.

A run is *opened* by its first part, together with its inbox row, which is due at the deadline. A transaction that adds a part
locks the run first, so that of two last parts, the later one sees the earlier; or, if its snapshot is older, fails with a
serialization error and is run again, because the lock is an UPDATE. The lock is held for a few statements, never
while a user's function runs. The row of a run is locked after the run, or alone, so these locks cannot deadlock.
"""

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.apps import apps
from django.db import connections
from django.db.models import F, Q, QuerySet

from exactly_once.packages import label_of
from exactly_once.sql.connections import fetch, is_postgresql
from exactly_once.sql.days import LIVE
from exactly_once.sql.now import DatabaseTime
from exactly_once.sql.partitions import on_all_days
from exactly_once.wire.envelope import JSON
from exactly_once.wire.identity import new_message_id, uuid_in
from inbox.contrib.joins.models import Part, Run
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.models import InboxMessage, Receipt
from inbox.states import DUE, State
from inbox.store import receipts
from inbox.store.arrivals import insert_one
from inbox.store.dialect import BOUND, LONGEST_LOCK_WAIT, UNBOUND, as_bound
from inbox.store.message_rows import PARKED, NewRow

TOPIC = "inbox.join"
"""The topic in the inbox rows of runs. No message is delivered for it."""
_RUNS = Run._meta.db_table
_MOST_NAMED = 5


def lock(alias: str, handler: str, run_id: str) -> Run | None:
    """Lock a run, of which at least the ids are read; None if it does not exist.

    Raises:
        django.db.OperationalError: another transaction holds the lock for too long. The inbox runs the message again.
    """
    connection = connections[alias]
    if not is_postgresql(connection):
        return Run.objects.using(alias).filter(handler=handler, run_id=run_id).first()
    # One round trip: bound the wait, lock, restore the transaction's own lock_timeout.
    ((pk, row_id, _),) = fetch(
        connection,
        # FOR UPDATE would not do: it changes nothing, so a later REPEATABLE READ transaction would get no error.
        f"{BOUND}, locked AS (UPDATE {_RUNS} r SET started_by = r.started_by FROM bound "
        "WHERE r.handler = %s AND r.run_id = %s RETURNING r.id, r.row_id) "
        f"SELECT locked.*, {UNBOUND} FROM bound LEFT JOIN locked ON true",
        [as_bound(LONGEST_LOCK_WAIT), handler, run_id],
    )
    return None if pk is None else Run(pk=pk, row_id=row_id)


def open_run(alias: str, handler: str, run_id: str, deadline: timedelta, first: Message) -> Run | None:
    """∅ → received, due at the deadline, for the run's inbox row; and the run. None: the row exists.

    Raises:
        ConcurrentDuplicate: another transaction is opening it and did not end in time.
    """
    body = json.dumps({"run_id": run_id}).encode()
    row = NewRow(
        handler=handler,
        topic=TOPIC,
        biz_id=run_id,
        body=body,
        digest=hashlib.sha256(body).hexdigest(),
        message_id=str(new_message_id()),
        content_type=JSON,
        correlation_id=first.correlation_id or first.id,
        causation_id=first.id,
    )
    inserted = insert_one(alias, row, State.RECEIVED, LONGEST_LOCK_WAIT, due_after=deadline.total_seconds())
    if inserted is None:
        return None
    # By the same statement, so that the row is not due before the deadline.
    opened_at, deadline_at = times_of(alias, inserted)
    run = Run(handler=handler, run_id=run_id, row_id=inserted, opened_at=opened_at, deadline_at=deadline_at)
    run.save(using=alias, force_insert=True)
    return run


def times_of(alias: str, row: int) -> tuple[datetime, Any]:
    """When the row of a run was received, and when it is due."""
    return InboxMessage.objects.using(alias).values_list("received_at", "next_attempt_at").get(pk=row, day=LIVE)


def add_part(alias: str, run: Run, topic: str, payload: Any, **columns: Any) -> None:
    """Add a message to its run, unless a message of this topic has come before."""
    part = Part(run_id=run.pk, topic=topic, body=json.dumps(payload).encode(), stored_at=DatabaseTime(), **columns)
    Part.objects.using(alias).bulk_create([part], ignore_conflicts=True)


def parts(alias: str, run: Run) -> QuerySet[Part]:
    # Not `run.parts`, which a database router may read from a replica.
    return Part.objects.using(alias).filter(run_id=run.pk)


def make_due(alias: str, run: Run) -> bool:
    """received | retrying → the same, due now, because all messages of the run have come. False: it is not waiting, or locked.

    It does not wait for the row, which a runner has locked while the function of the join runs. A claim counts an attempt.
    """
    return bool(_unlocked(alias, run, attempts=0).update(next_attempt_at=DatabaseTime()))


def hold_back(alias: str, run: Run) -> bool:
    """Lock the run's row, so that its next attempt begins after this transaction. False: an attempt is running now."""
    # An UPDATE, see `lock`.
    return bool(_unlocked(alias, run).update(attempts=F("attempts")))


def _unlocked(alias: str, run: Run, **conditions: Any) -> QuerySet[InboxMessage]:
    """The run's row if it is received or retrying, meets the conditions, and is not locked by another transaction."""
    rows = InboxMessage.objects.using(alias).filter(pk=run.row_id, day=LIVE)
    due = rows.filter(state__in=[State.RECEIVED, State.RETRYING], **conditions)
    return rows.filter(pk__in=due.select_for_update(skip_locked=is_postgresql(connections[alias])).values("pk"))


def state_of(alias: str, run: Run) -> tuple[str, int]:
    """The state and the attempts of the run's inbox row."""
    found = receipts.message(alias, run.row_id).values_list("state", "attempts").first()
    return found or ("", 0)


def may_lack_messages(alias: str, run: Run) -> bool:
    """Do its attempts not wait for missing messages? The deadline has passed, or an operator has started it."""
    runs = Run.objects.using(alias).filter(pk=run.pk)
    return runs.filter(Q(deadline_at__lte=DatabaseTime()) | ~Q(started_by="")).exists()


def collected(alias: str, handler: str, run_id: str) -> Any:
    """A run, with `database_now`, for its function; None if it does not exist."""
    return Run.objects.using(alias).filter(handler=handler, run_id=run_id).annotate(database_now=DatabaseTime()).first()


def unhandled(alias: str, run: Run, topics: Mapping[str, str]) -> list[str]:
    """The messages, by their rows, that arrived before the deadline of the run, are stored, and are not handled yet.

    Args:
        topics: by the handlers that collect them.
    """
    having = _receipts(alias, topics)
    # Of any run, because it is not read. The bounds are for the unique index, which serves a LIKE in some collations only.
    unread = having.filter(biz_id__gte="parked", biz_id__lt="parkee", biz_id__startswith=PARKED)
    rows = InboxMessage.objects.using(alias).filter(day=LIVE, state__in=DUE, received_at__lte=run.deadline_at)
    found = [
        row
        for named in (having.filter(biz_id=run.run_id), unread)
        for row in rows.filter(pk__in=named.values("pk")).values_list("pk", "topic")[:_MOST_NAMED]
    ]
    return [f"row {pk} ({topic})" for pk, topic in found[:_MOST_NAMED]]


def age(alias: str, run_id: str, topics: Mapping[str, str]) -> timedelta:
    """How long ago the first message of a run arrived, handled or not."""
    instants = _receipts(alias, topics).filter(biz_id=run_id).values_list("received_at", DatabaseTime())
    return max((asked_at - received_at for received_at, asked_at in instants), default=timedelta())


def _receipts(alias: str, topics: Mapping[str, str]) -> QuerySet[Receipt]:
    return Receipt.objects.using(alias).filter(handler__in=topics.keys(), topic__in=topics.values())


def first_unhandled(alias: str, handler: Handler, topic: str, members: Mapping[str, str]) -> tuple[str, str] | None:
    """The id of the first of these messages that is not settled in this handler, and its state, "" if it is not there.

    A message has the row of its biz-id, which may be that of another message; or of its message id, if the handler chooses the
    biz-id, or has refused the message. A correction, also one of a correction, has the message id of the first row.

    Args:
        members: biz-ids by message ids.
    """
    rows, found = InboxMessage.objects.using(alias), dict[str, tuple[int, str]]()
    if handler.biz_id is None:
        named = Receipt.objects.using(alias).filter(handler=handler.name, topic=topic, biz_id__in=[*members.values()])
        by_name = {biz_id: (pk, of) for biz_id, pk, of in named.values_list("biz_id", "pk", "message_id")}
        found = {name: by_name[biz_id] for name, biz_id in members.items() if biz_id in by_name}
    if unnamed := members.keys() - found:
        by_id = on_all_days(rows.filter(handler=handler.name, message_id__in=unnamed), "pk", "message_id")
        found |= {name: (pk, name) for pk, name in sorted(by_id.items())}
    for name in members:
        if name not in found:
            return name, ""
    pks, ids = zip(*found.values(), strict=True)
    corrections = Q(handler=handler.name, message_id__in=ids, replaces__isnull=False)
    open_ones = rows.filter(Q(pk__in=pks) | corrections, day=LIVE).order_by("state")
    return open_ones.values_list("message_id", "state").first()


def is_unsent(alias: str, message_id: str) -> bool:
    """Is this message still in the outbox, as a delayed one or that of a paused topic?"""
    outbox: QuerySet[Any] = QuerySet(apps.get_model(label_of("outbox"), "OutboxMessage"), using=alias)
    return outbox.filter(message_id=uuid_in(message_id), day=LIVE).exists()
