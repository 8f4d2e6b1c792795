"""What the modules of the store share: the tables, and small differences between the databases."""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from outbox.database.connections import is_postgresql
from outbox.expressions import DAY_OF_NOW
from outbox.models import OutboxMessage, PausedTopic

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_T = TypeVar("_T")

TABLE = OutboxMessage._meta.db_table
"""All messages. On PostgreSQL a statement that names it locks history, too, so what is done for each message names a part."""
LIVE_PART = f"{TABLE}_live"
"""On PostgreSQL: what is not settled."""
HISTORY = f"{TABLE}_history"
"""On PostgreSQL: what is settled, in a partition for each day."""
COLUMNS = [str(field.column) for field in OutboxMessage._meta.concrete_fields]
"""All of a message."""
PAUSED_TOPICS = PausedTopic._meta.db_table
LOCK_SPACE = zlib.crc32(TABLE.encode()) - 2**31
"""First key of every advisory lock of the outbox; the second is the shard."""


def live(connection: BaseDatabaseWrapper) -> str:
    """The table to name for messages that are not settled: alone on PostgreSQL, with the others on SQLite."""
    return LIVE_PART if is_postgresql(connection) else TABLE


def today(connection: BaseDatabaseWrapper) -> str:
    return DAY_OF_NOW[connection.vendor]


def each_topic(messages: str) -> str:
    """A query for the topics of `messages`, a FROM item `m` with its WHERE: every `name` once.

    A loose index scan: the index gives each topic after the one before, in a step for each topic and not for each message.
    """
    return (
        f"WITH RECURSIVE topics(name) AS (SELECT (SELECT min(m.topic) FROM {messages}) UNION ALL "
        f"SELECT (SELECT min(m.topic) FROM {messages} AND m.topic > topics.name) FROM topics WHERE name IS NOT NULL) "
        "SELECT name FROM topics WHERE name IS NOT NULL"
    )


def any_of(connection: BaseDatabaseWrapper, values: Sequence[int]) -> tuple[str, Any]:
    """A condition "is one of these numbers" and its one parameter, however many they are."""
    if is_postgresql(connection):
        return "= ANY(%s::bigint[])", array_of(values)
    return "IN (SELECT value FROM json_each(%s))", json.dumps(list(values))


def some_uuids(connection: BaseDatabaseWrapper, values: Iterable[uuid.UUID]) -> tuple[str, str]:
    """A table of these ids, in their order, whose one column is `id`, and its one parameter."""
    if is_postgresql(connection):
        return "unnest(%s::uuid[]) given(id)", array_of(values)
    return "(SELECT value AS id FROM json_each(%s)) given", json.dumps([value.hex for value in values])


def array_of(values: Iterable[int] | Iterable[uuid.UUID]) -> str:
    """An array as PostgreSQL writes it. psycopg's dumper of lists costs more than what these are for."""
    return f"{{{','.join(map(str, values))}}}"


def as_uuid(value: uuid.UUID | str) -> uuid.UUID:
    return value if isinstance(value, uuid.UUID) else uuid.UUID(value)


def chunks(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
