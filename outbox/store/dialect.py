"""The names of the tables, and small differences between the databases, for all modules of the store."""

import json
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from exactly_once.sql.connections import execute, is_outermost, is_postgresql, set_local
from exactly_once.sql.now import NOW
from outbox.models import OutboxMessage, PausedTopic

_T = TypeVar("_T")

TABLE = OutboxMessage._meta.db_table
"""All messages. On PostgreSQL a statement that names this table also locks history, so frequent statements name one part."""
LIVE_PART = f"{TABLE}_live"
"""On PostgreSQL: the messages that are not settled."""
LIVE_TABLE = {"postgresql": LIVE_PART, "sqlite": TABLE}
"""The table of the messages that are not settled, by database."""
HISTORY = f"{TABLE}_history"
"""On PostgreSQL: the settled messages, in one partition for each day."""
COLUMNS = [str(field.column) for field in OutboxMessage._meta.concrete_fields]
"""All columns of a message."""
PAUSED_TOPICS = PausedTopic._meta.db_table
EVER = "-infinity"
"""Since this instant: however long ago."""
DRAWN = {
    # In a subquery, so that it is drawn once for a statement.
    "postgresql": f"(SELECT nextval(pg_get_serial_sequence('{TABLE}', 'id')::regclass))",
    "sqlite": "1",
}
"""The next number of the sequence of positions. Floors wait for transactions that have drawn one."""
DO_NOT_WAIT_FOR_THE_DISK = "SET LOCAL synchronous_commit = off"
LOCK_SPACE = zlib.crc32(TABLE.encode()) - 2**31
"""First key of every advisory lock of the outbox; the second is the shard."""


def database_of(using: str | None) -> str:
    """The alias of an outbox: as given, or as the database routers decide for its messages."""
    return using or router.db_for_write(OutboxMessage)


def begin_bounded(alias: str, longest: timedelta, *, first: str = "") -> None:
    """Let the server end the open transaction if it is idle, or executes one statement, for this long.

    Args:
        first: statements to execute before that, in the same round trip.
    """
    connection = connections[alias]
    if script := bounds(connection, longest):
        execute(connection, first + script)


def bounds(connection: BaseDatabaseWrapper, longest: timedelta) -> str:
    """The statements of `begin_bounded`; "" inside the transaction of a test, where the settings would remain afterwards."""
    if not (is_postgresql(connection) and is_outermost(connection)):
        return ""
    return set_local(idle_in_transaction_session_timeout=longest, statement_timeout=longest)


@contextmanager
def repeatable(alias: str) -> Iterator[None]:
    """A transaction whose commit does not wait for the disk. If the server crashes and loses it, the relay repeats it."""
    connection = connections[alias]
    with transaction.atomic(using=alias):
        if is_postgresql(connection) and is_outermost(connection):
            execute(connection, DO_NOT_WAIT_FOR_THE_DISK)
        yield


def live(connection: BaseDatabaseWrapper) -> str:
    """The table of the messages that are not settled: the live partition on PostgreSQL, the whole table on SQLite."""
    return LIVE_TABLE[connection.vendor]


def seconds_until(vendor: str, instant: str) -> str:
    """The seconds from now to the value of a column."""
    if vendor == "postgresql":
        return f"CAST(EXTRACT(EPOCH FROM {instant} - {NOW[vendor]}) AS float8)"
    return f"(julianday({instant}) - julianday({NOW[vendor]})) * 86400"


def each_topic(messages: str) -> str:
    """A query for the distinct topics of `messages`, a FROM item `m` with its WHERE; the column is `name`.

    It is a loose index scan: one index lookup for each topic, not for each message.
    """
    return (
        f"WITH RECURSIVE topics(name) AS (SELECT (SELECT min(m.topic) FROM {messages}) UNION ALL "
        f"SELECT (SELECT min(m.topic) FROM {messages} AND m.topic > topics.name) FROM topics WHERE name IS NOT NULL) "
        "SELECT name FROM topics WHERE name IS NOT NULL"
    )


def any_of(connection: BaseDatabaseWrapper, values: Sequence[int]) -> tuple[str, Any]:
    """A condition "is one of these numbers", and its single parameter."""
    if is_postgresql(connection):
        return "= ANY(%s::bigint[])", array_of(values)
    return "IN (SELECT value FROM json_each(%s))", json.dumps(list(values))


def some_uuids(connection: BaseDatabaseWrapper, values: Iterable[uuid.UUID]) -> tuple[str, str]:
    """A FROM item with these ids in their order, in the column `id`, and its single parameter."""
    if is_postgresql(connection):
        return "unnest(%s::uuid[]) given(id)", array_of(values)
    return "(SELECT value AS id FROM json_each(%s)) given", json.dumps([value.hex for value in values])


def array_of(values: Iterable[int] | Iterable[uuid.UUID]) -> str:
    """An array in PostgreSQL's text format. psycopg's adaptation of lists takes longer than the queries that use it."""
    return f"{{{','.join(map(str, values))}}}"


def array_of_places(values: Iterable[str]) -> str:
    """A `tid[]` in PostgreSQL's text format."""
    return "{" + ",".join(f'"{place}"' for place in values) + "}"


def stored(connection: BaseDatabaseWrapper, value: uuid.UUID) -> uuid.UUID | str:
    """A message id as a parameter of a statement."""
    return value if connection.features.has_native_uuid_field else value.hex


def as_uuid(value: uuid.UUID | str) -> uuid.UUID:
    return value if isinstance(value, uuid.UUID) else uuid.UUID(value)


def chunks(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
