"""Messages published with `unique=True`: of those with one topic and biz-id, at most one has not been given up.

The index `outbox_unique_biz_id` guarantees this of what is live, whoever writes and however concurrently. An insert that meets
such a message waits until the transaction that wrote it, or is giving it up or publishing it, has ended.

On PostgreSQL a published message is history, where that index does not reach. So whoever has inserted a row, and met no other,
asks history with another statement. The order makes it safe: from the moment when the row is in the index until its
transaction ends, no other message with its name can become live, so what may be in history was there before. The statement
that asks is younger, so it sees what was committed there.

With REPEATABLE READ or SERIALIZABLE a statement sees no more than the transaction's first. There the index
`outbox_history_unique` is asked: an insert, which is rolled back, meets what the transaction cannot see.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from django.db import IntegrityError, OperationalError, connections, transaction
from django.db.models import Exists, OuterRef, Q

from outbox.database.connections import is_postgresql
from outbox.database.faults import SERIALIZATION_FAILURE, sqlstate_of
from outbox.expressions import DAY_OF_NOW
from outbox.models import OutboxMessage
from outbox.states import GIVEN_UP
from outbox.store.dialect import COLUMNS, HISTORY, LIVE_PART, TABLE, array_of

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_GIVEN_UP = ", ".join(repr(state.value) for state in GIVEN_UP)
# The condition of the index, word for word: SQLite infers the index from nothing else.
UNLESS_FOUND = f"ON CONFLICT (topic, biz_id) WHERE is_unique AND NOT (state IN ({_GIVEN_UP})) DO NOTHING"

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
    # What this transaction cannot see was settled after it began. A day more, for a statement that began before it.
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
"""It was given up, and another message has been published in its place. Of several that were given up, the last counts."""


class UniqueMessage(NamedTuple):
    message_id: uuid.UUID
    position: int
    state: str


def is_published_already(alias: str, positions: Sequence[int]) -> bool:
    """Is there in history what one of these live messages, which were inserted just now, must not be beside?

    Raises:
        django.db.OperationalError: a serialization failure. There is, and this transaction can see it nowhere.
    """
    connection = connections[alias]
    if not is_postgresql(connection):
        return False
    with connection.cursor() as cursor:
        cursor.execute(_PUBLISHED, [array_of(positions)])
        sees_all, is_published = cursor.fetchone()
    return is_published or not (sees_all or _may_be_published(connection, positions))


def require_unpublished(alias: str, positions: Sequence[int]) -> None:
    """As the index of what is live, also for history.

    Raises:
        django.db.IntegrityError, django.db.OperationalError: one of these live messages must not be beside a published one.
    """
    if is_published_already(alias, positions):
        raise IntegrityError("a message with its topic and biz-id has been published")


def _may_be_published(connection: BaseDatabaseWrapper, positions: Sequence[int]) -> bool:
    """Would they meet no other in history? Asked by an insert that is rolled back."""
    try:
        with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
            cursor.execute(_PUBLISH, [array_of(positions)])
            transaction.set_rollback(True, using=connection.alias)
    except OperationalError as error:
        if sqlstate_of(error) != SERIALIZATION_FAILURE:
            raise
        with connection.cursor() as cursor:
            cursor.execute(_VISIBLE, [array_of(positions)])
            if not cursor.fetchone()[0]:
                raise
        return False
    return True


def find_unique(alias: str, topic: str, biz_id: str) -> UniqueMessage | None:
    """The message that an insert has met; None when it has been given up or purged since."""
    # The last of several: a transaction with one snapshot still sees one that has been given up since it began.
    found = (
        OutboxMessage.objects.using(alias)
        .filter(topic=topic, biz_id=biz_id, is_unique=True)
        .exclude(state__in=GIVEN_UP)
        .order_by("-pk")
        .values_list("message_id", "pk", "state")
        .first()
    )
    return found and UniqueMessage(*found)


def is_replaced(alias: str, position: int) -> bool:
    """Was this message given up, and another one published in its place?"""
    return OutboxMessage.objects.using(alias).filter(IS_REPLACED, pk=position).exists()
