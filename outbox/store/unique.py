"""Messages published with `unique=True`: for each topic and biz-id at most one that is not expired, cancelled or rolled back.

The index `outbox_unique_biz_id` guarantees this for live messages, with any number of concurrent writers. An insert that
conflicts with an uncommitted change waits until the other transaction has ended.

On PostgreSQL a published message is in history, which this index does not cover. So after an insert without a conflict, a
second statement searches history. This order is safe: from the moment when the row is in the index until its transaction ends,
no other message of this topic and biz-id can become live. So a message in history was committed before the second statement
began, which therefore sees it.

With REPEATABLE READ or SERIALIZABLE the second statement has the snapshot of the first. There an insert into history, which is
rolled back, conflicts in the index `outbox_history_unique` with a message that the transaction cannot see.
"""

import json
import uuid
from collections.abc import Sequence
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.db import IntegrityError, OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Exists, OuterRef, Q

from exactly_once.sql.connections import fetch, is_postgresql
from exactly_once.sql.days import DAY_OF_NOW, LIVE
from exactly_once.sql.faults import SERIALIZATION_FAILURE, sqlstate_of
from outbox.models import OutboxMessage
from outbox.states import GIVEN_UP
from outbox.store.dialect import COLUMNS, HISTORY, LIVE_PART, TABLE, array_of
from outbox.store.selecting import identified

_GIVEN_UP = ", ".join(repr(state.value) for state in GIVEN_UP)
# SQLite infers a partial index only from the text of its condition, which each version of Django writes in its own way. There
# the message id is unique, too, and is new.
UNLESS_FOUND = {
    "postgresql": f"ON CONFLICT (topic, biz_id) WHERE is_unique AND NOT (state IN ({_GIVEN_UP})) DO NOTHING",
    "sqlite": "ON CONFLICT DO NOTHING",
}

_PUBLISHED = (
    "SELECT current_setting('transaction_isolation') = 'read committed', EXISTS ("
    f"SELECT FROM {LIVE_PART} mine JOIN {HISTORY} theirs ON theirs.topic = mine.topic AND theirs.biz_id = mine.biz_id "
    "WHERE mine.id = ANY(%s::bigint[]) AND mine.is_unique AND theirs.is_unique AND theirs.state = 'published')"
)
_VISIBLE = (
    f"SELECT EXISTS (SELECT FROM {LIVE_PART} mine JOIN {TABLE} theirs ON theirs.topic = mine.topic "
    "AND theirs.biz_id = mine.biz_id AND theirs.id <> mine.id WHERE mine.id = ANY(%s::bigint[]) AND mine.is_unique "
    f"AND theirs.is_unique AND NOT (theirs.state IN ({_GIVEN_UP})))"
)
_DAYS = (
    # A message that this transaction cannot see was settled after it began; or a day earlier, by a statement that began before.
    "generate_series(CAST(floor(EXTRACT(EPOCH FROM transaction_timestamp()) / 86400) AS int) - 1, "
    f"{DAY_OF_NOW['postgresql']}) settled(day)"
)
_PUBLISHED_ON_THEM = {"state": "'published'", "day": "settled.day"}
_PUBLISH = (
    f"INSERT INTO {HISTORY} ({', '.join(COLUMNS)}) "
    f"SELECT {', '.join(_PUBLISHED_ON_THEM.get(name, f'mine.{name}') for name in COLUMNS)} FROM {LIVE_PART} mine, {_DAYS} "
    "WHERE mine.id = ANY(%s::bigint[]) AND mine.is_unique ON CONFLICT DO NOTHING"
)

IS_REPLACED = Q(is_unique=True, state__in=GIVEN_UP) & Q(
    Exists(
        OutboxMessage.objects.filter(
            Q(pk__gt=OuterRef("pk")) | ~Q(state__in=GIVEN_UP),
            topic=OuterRef("topic"),
            biz_id=OuterRef("biz_id"),
            is_unique=True,
        )
    )
)
"""The message was given up, and another one with its topic and biz-id was published later or is not given up."""


def is_published_already(alias: str, positions: Sequence[int]) -> bool:
    """Is a unique message with the topic and biz-id of one of these newly inserted messages in history?

    Raises:
        django.db.OperationalError: a serialization failure. There is one, which this transaction cannot see.
    """
    connection = connections[alias]
    if not is_postgresql(connection):
        return False
    ((sees_all, is_published),) = fetch(connection, _PUBLISHED, [array_of(positions)])
    return is_published or not (sees_all or _may_be_published(connection, positions))


def require_unpublished(alias: str, positions: Sequence[int]) -> None:
    """Enforce the unique index also for history.

    Raises:
        django.db.IntegrityError, django.db.OperationalError: the topic and biz-id of one of these messages were published.
    """
    if is_published_already(alias, positions):
        raise IntegrityError("a message with its topic and biz-id has been published")


def _may_be_published(connection: BaseDatabaseWrapper, positions: Sequence[int]) -> bool:
    """Would an insert of these messages into history succeed? The insert is rolled back."""
    try:
        with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
            cursor.execute(_PUBLISH, [array_of(positions)])
            transaction.set_rollback(True, using=connection.alias)
    except OperationalError as error:
        if sqlstate_of(error) != SERIALIZATION_FAILURE:
            raise
        if not fetch(connection, _VISIBLE, [array_of(positions)])[0][0]:
            raise
        return False
    return True


def find_unique(alias: str, topic: str, biz_id: str) -> tuple[uuid.UUID, int, str] | None:
    """Id, position and state of the message with which an insert conflicted; None if it has been given up or purged since."""
    # The last of several: a transaction with one snapshot still sees a message that was given up after it began.
    found = OutboxMessage.objects.using(alias).filter(topic=topic, biz_id=biz_id, is_unique=True).exclude(state__in=GIVEN_UP)
    names = found.order_by("-pk").values_list("message_id", "pk", "state")
    # A live one without history, which is locked by reading it.
    return names.filter(day=LIVE).first() or names.first()


def has_payload(alias: str, message_id: uuid.UUID, payload: Any) -> bool:
    """Has a message this payload, compared as JSON? True if it has been purged."""
    # By its id: the index of positions in history is a BRIN index, of little use after delayed messages.
    body = identified(alias, [message_id]).values_list("body", flat=True).first()
    return body is None or _canonical(bytes(body)) == _canonical(DjangoJSONEncoder().encode(payload))


def _canonical(document: str | bytes) -> str:
    # To Python, 1 equals true.
    return json.dumps(json.loads(document), sort_keys=True)


def is_replaced(alias: str, position: int) -> bool:
    """Was this message given up, and another one with its topic and biz-id published?"""
    return OutboxMessage.objects.using(alias).filter(IS_REPLACED, pk=position).exists()
