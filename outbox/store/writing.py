"""Writing messages: one INSERT in the caller's transaction, or one COPY of many.

The order of a key goes by the positions of its rows, and a database numbers rows as they are inserted, not as they are
committed. `hold_order` makes the two one: who holds the order of a key numbers its rows alone until the transaction ends.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections

from outbox.database.connections import is_postgresql
from outbox.database.now import now, now_after
from outbox.models import SHARDS
from outbox.states import State
from outbox.store.dialect import HISTORY, LIVE_PART, TABLE, as_uuid, chunks, live
from outbox.store.trail import record_insert
from outbox.store.unique import UNLESS_FOUND, is_published_already

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

ORDER_SPACE = zlib.crc32(f"{TABLE}.key".encode()) - 2**31
"""First key of the advisory locks that hold the order of keys; the second is a hash of the key."""

_READY, _SCHEDULED, _PREPARED = State.READY.value, State.SCHEDULED.value, State.PREPARED.value
_INSERT_CHUNK = 500
_COPIED_FROM = 10
"""So many rows are copied rather than inserted: a COPY asks the server three times, and then each row costs a fraction."""


class NewRow(NamedTuple):
    """A checked message, ready to be written. `body` and `headers` are serialised; spans count from the insert."""

    message_id: uuid.UUID
    topic: str
    biz_id: str
    key: str
    priority: int
    body: bytes
    headers: str
    correlation_id: str
    causation_id: str
    traceparent: str
    is_unique: bool
    delay: timedelta | None
    deliver_at: datetime | None
    expires_in: timedelta | None

    @property
    def state(self) -> str:
        """The state in which it is written, unless it is prepared."""
        return _SCHEDULED if self.deliver_at is not None or self.delay else _READY


def shard_of(row: NewRow) -> int:
    """The slice a message belongs to: by its key, so that one relay at a time has all of a key's messages."""
    return zlib.crc32(row.key.encode() or row.message_id.bytes) % SHARDS


_COLUMNS = {
    "message_id": "uuid",
    "topic": "varchar",
    "biz_id": "varchar",
    "key": "varchar",
    "shard": "int2",
    "priority": "int2",
    "body": "bytea",
    "headers": "text",  # jsonb, in its binary form: see _copied
    "correlation_id": "varchar",
    "causation_id": "varchar",
    "traceparent": "varchar",
    "is_unique": "bool",
    "attempts": "int4",
    "last_error": "text",
    "created_at": "timestamptz",
    "deliver_at": "timestamptz",
    "available_at": "timestamptz",
    "expires_at": "timestamptz",
    "state": "varchar",
}
"""What is written, with the PostgreSQL type that a COPY of it is encoded as."""

_INTO = f"({', '.join(_COLUMNS)}) VALUES"
_INTO_FORMED = f"({', '.join(_COLUMNS)}, wire) VALUES"
_COPY = f"COPY {LIVE_PART} (id, {', '.join(_COLUMNS)}) FROM STDIN (FORMAT BINARY)"
_DRAW = (
    f"SELECT array_agg(nextval((SELECT pg_get_serial_sequence('{TABLE}', 'id')::regclass))), "
    "statement_timestamp() AT TIME ZONE 'UTC' FROM generate_series(1, %s)"
)


def hold_order(alias: str, keys: Collection[str]) -> None:
    """Let no other transaction that holds the order of one of these keys number a row before this one has ended.

    A statement of its own, so that the numbers are drawn, and the clock is read, when the wait is over. The locks are taken
    in one order by everybody, lest two calls wait for each other. Keys that share a hash wait without need.

    SQLite has one writer: its INSERT has the write lock before it draws a number, however the transaction began.
    """
    connection = connections[alias]
    if not keys or not is_postgresql(connection):
        return
    hashes = sorted({zlib.crc32(key.encode()) - 2**31 for key in keys})
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT pg_advisory_xact_lock({ORDER_SPACE}, hash) FROM unnest(%s::int[]) hash", [hashes])


def insert(alias: str, row: NewRow) -> int | None:
    """Write one message; its position, or None when it is to be unique and is not, see `find_unique`."""
    connection = connections[alias]
    values, parameters = _values(connection, row)
    with connection.cursor() as cursor:
        unless = UNLESS_FOUND if row.is_unique else ""
        cursor.execute(f"INSERT INTO {live(connection)} {_INTO} {values} {unless} RETURNING id", parameters)
        found = cursor.fetchone()
    if found and row.is_unique and is_published_already(alias, found):
        _take_back(connection, found)
        return None
    return _begun(alias, found)


def insert_formed(alias: str, row: NewRow, wire: str) -> int | None:
    """Write one message in the form of another protocol; its position, or None when another row has its message id.

    Such an id may come from outside (a Celery task id), and need not be fresh.
    """
    connection = connections[alias]
    values, parameters = _values(connection, row)
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {live(connection)} {_INTO_FORMED} {values.removesuffix(')')}, %s) "
            "ON CONFLICT (message_id) DO NOTHING RETURNING id",
            [*parameters, wire],
        )
        found = cursor.fetchone()
        if found and is_postgresql(connection):
            cursor.execute(f"SELECT 1 FROM {HISTORY} WHERE message_id = %s LIMIT 1", [row.message_id])
            if cursor.fetchone():
                _take_back(connection, found)
                return None
    return _begun(alias, found)


def insert_prepared(alias: str, row: NewRow, check_after: timedelta) -> int:
    """Write one message that nobody has decided about yet, to be asked for when so much time has passed; its position."""
    connection = connections[alias]
    values, parameters = _values(connection, row, check_after)
    with connection.cursor() as cursor:
        cursor.execute(f"INSERT INTO {live(connection)} {_INTO} {values} RETURNING id", parameters)
        position: int = cursor.fetchone()[0]
    record_insert(alias, [position])
    return position


def insert_many(alias: str, rows: Sequence[NewRow]) -> list[int]:
    """Write many messages, none of them unique; their positions in the order of `rows`."""
    connection = connections[alias]
    with connection.cursor() as cursor:
        if len(rows) >= _COPIED_FROM and is_postgresql(connection) and hasattr(cursor, "copy"):  # psycopg 3 has it
            copied = _copy(connection, cursor, rows)
            record_insert(alias, copied)
            return copied
        positions: dict[uuid.UUID, int] = {}
        for chunk in chunks(rows, _INSERT_CHUNK):
            values, parameters = zip(*(_values(connection, row) for row in chunk), strict=True)
            cursor.execute(
                f"INSERT INTO {live(connection)} {_INTO} {', '.join(values)} RETURNING id, message_id",
                [parameter for some in parameters for parameter in some],
            )
            positions.update((as_uuid(message_id), position) for position, message_id in cursor.fetchall())
    record_insert(alias, list(positions.values()))
    return [positions[row.message_id] for row in rows]


def _take_back(connection: BaseDatabaseWrapper, position: Sequence[Any]) -> None:
    """Delete the row that this transaction has just inserted."""
    with connection.cursor() as cursor:
        cursor.execute(f"DELETE FROM {LIVE_PART} WHERE id = %s", position)


def _begun(alias: str, found: Sequence[Any] | None) -> int | None:
    if found is None:
        return None
    record_insert(alias, found)
    return int(found[0])


def _copy(connection: BaseDatabaseWrapper, cursor: Any, rows: Sequence[NewRow]) -> list[int]:
    """A COPY answers nothing, so the positions are drawn beforehand, with the database's time."""
    cursor.execute(_DRAW, [len(rows)])
    drawn, instant = cursor.fetchone()
    positions: list[int] = sorted(drawn)
    created_at = instant.replace(tzinfo=UTC)
    with connection.wrap_database_errors, cursor.copy(_COPY) as copy:
        copy.set_types(["int8", *_COLUMNS.values()])
        for position, row in zip(positions, rows, strict=True):
            copy.write_row(_copied(row, position, created_at))
    return positions


def _copied(row: NewRow, position: int, created_at: datetime) -> tuple[Any, ...]:
    deliver_at = row.deliver_at or (created_at + row.delay if row.delay else None)
    available_at = deliver_at or created_at
    return (
        position,
        row.message_id,
        row.topic,
        row.biz_id,
        row.key,
        shard_of(row),
        row.priority,
        row.body,
        "\x01" + row.headers,  # jsonb travels as the number of its format and its text
        row.correlation_id,
        row.causation_id,
        row.traceparent,
        row.is_unique,
        0,
        "",
        created_at,
        deliver_at,
        available_at,
        available_at + row.expires_in if row.expires_in else None,
        row.state,
    )


def _values(connection: BaseDatabaseWrapper, row: NewRow, check_after: timedelta | None = None) -> tuple[str, list[Any]]:
    """The row as an item of VALUES, and its parameters."""
    parameters: list[Any] = [
        row.message_id if connection.features.has_native_uuid_field else row.message_id.hex,
        row.topic,
        row.biz_id,
        row.key,
        shard_of(row),
        row.priority,
        row.body,
        row.headers,
        row.correlation_id,
        row.causation_id,
        row.traceparent,
        row.is_unique,
    ]
    place: str
    told: Callable[[Any], Any]
    due: Any
    if row.deliver_at is not None:
        place, told, due = "%s", connection.ops.adapt_datetimefield_value, row.deliver_at
    else:
        place, told, due = now_after(connection), timedelta.total_seconds, row.delay or timedelta()
    is_scheduled = row.state == _SCHEDULED
    if is_scheduled:
        parameters += [told(due)] * (2 if check_after is None else 1)
    if check_after is not None:
        parameters.append(check_after.total_seconds())
    if row.expires_in:
        parameters.append(told(due + row.expires_in))
    check_at = None if check_after is None else now_after(connection)
    expires = row.expires_in is not None
    return _item(_now(connection), place, check_at, is_scheduled=is_scheduled, expires=expires), parameters


def _now(connection: BaseDatabaseWrapper) -> str:
    # Adding nothing to it costs the server a fifth of the whole INSERT.
    return "statement_timestamp()" if is_postgresql(connection) else now(connection)


@lru_cache(maxsize=64)
def _item(at_once: str, place: str, check_at: str | None, *, is_scheduled: bool, expires: bool) -> str:
    due = place if is_scheduled else at_once
    instants = [at_once, due if is_scheduled else "NULL", check_at or due, place if expires else "NULL"]
    state = _PREPARED if check_at else _SCHEDULED if is_scheduled else _READY
    return f"({', '.join(['%s'] * 12)}, 0, '', {', '.join(instants)}, '{state}')"
