"""Inserting messages: one INSERT in the caller's transaction, or one COPY of many.

Messages of a key are ordered by position, and a database draws positions in the order of the inserts, not of the commits.
`hold_order` makes both orders equal: other transactions that call it for the same key wait until this one has ended.
"""

import uuid
import zlib
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, cast

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from exactly_once.sql.connections import execute, fetch, is_postgresql
from exactly_once.sql.now import now, now_after
from exactly_once.sql.prepared_statements import PreparedStatement, is_worthwhile, numbered
from outbox.models import SHARDS
from outbox.states import State
from outbox.store.dialect import DRAWN, HISTORY, LIVE_PART, TABLE, as_uuid, chunks, live, stored
from outbox.store.transitions import is_recorded, record

ORDER_SPACE = zlib.crc32(f"{TABLE}.key".encode()) - 2**31
"""First key of the advisory locks of `hold_order`; the second is a hash of the ordering key."""

_READY, _SCHEDULED, _PREPARED = State.READY.value, State.SCHEDULED.value, State.PREPARED.value
_INSERT_CHUNK = 500
_COPIED_FROM = 10
"""From this number of rows on COPY is used: it takes three round trips, but a fraction of the time of an INSERT per row."""


def shard_of(key: str, message_id: uuid.UUID) -> int:
    """A hash of the key or, without one, of the message id. All messages of a key are in one shard."""
    return zlib.crc32(key.encode() or message_id.bytes) % SHARDS


class NewRow(NamedTuple):
    """A validated message to insert. `body` and `headers` are serialised; durations count from the insert.

    Attributes:
        wire: its format, if that is of another protocol, as in `RelayedMessage`.
        check_after: of a prepared message: when its first check is due.
    """

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
    wire: str | None = None
    check_after: timedelta | None = None

    @property
    def name(self) -> tuple[str, str]:
        return self.topic, self.biz_id

    @property
    def shard(self) -> int:
        return shard_of(self.key, self.message_id)

    @property
    def state(self) -> str:
        """The state in which it is inserted."""
        if self.check_after is not None:
            return _PREPARED
        return _SCHEDULED if self.deliver_at is not None or self.delay else _READY


_GIVEN = {
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
    "wire": "text",
}
"""The columns that a `NewRow` has a value for, with the PostgreSQL type in which a COPY encodes each."""
_COMPUTED = {
    "attempts": "int4",
    "last_error": "text",
    "created_at": "timestamptz",
    "deliver_at": "timestamptz",
    "available_at": "timestamptz",
    "expires_at": "timestamptz",
    "state": "varchar",
    "ready_position": "int8",
}
_COLUMNS = _GIVEN | _COMPUTED
_given = attrgetter(*_GIVEN)
_HEADERS = [*_GIVEN].index("headers")
_INTO = f"({', '.join(_COLUMNS)}) VALUES"
_COPY = f"COPY {LIVE_PART} (id, {', '.join(_COLUMNS)}) FROM STDIN (FORMAT BINARY)"
_DRAW = (
    f"SELECT array_agg(nextval((SELECT pg_get_serial_sequence('{TABLE}', 'id')::regclass))), "
    "statement_timestamp() AT TIME ZONE 'UTC' FROM generate_series(1, %s)"
)


def hold_order(alias: str, keys: Collection[str]) -> None:
    """Lock the order of these keys until the open transaction ends; other calls for one of them wait.

    It is a separate statement, so that positions are drawn, and the clock is read, after the wait. All calls take the locks in
    one order, so that they do not deadlock. Different keys with the same hash wait for each other as well.

    SQLite has one writer: its INSERT takes the write lock before it draws a position, however the transaction began.
    """
    connection = connections[alias]
    if not keys or not is_postgresql(connection):
        return
    hashes = sorted({zlib.crc32(key.encode()) - 2**31 for key in keys})
    execute(connection, f"SELECT pg_advisory_xact_lock({ORDER_SPACE}, hash) FROM unnest(%s::int[]) hash", [hashes])


def insert(alias: str, row: NewRow) -> int | None:
    """Insert one message, which has its name if it is unique; its position, or None if it conflicts with an earlier one.

    One in the format of another protocol conflicts with any that has its message id, which the caller may have chosen (a Celery
    task id).
    """
    connection = connections[alias]
    values, parameters = _values(connection, row)
    unless = "" if row.wire is None else "ON CONFLICT (message_id) DO NOTHING"
    statement = f"INSERT INTO {live(connection)} {_INTO} {values} {unless} RETURNING id"
    is_prepared = is_worthwhile(connection)
    found = _prepared(statement).fetch(connection, parameters) if is_prepared else fetch(connection, statement, parameters)
    if not found:
        return None
    position: int = found[0][0]
    if row.wire is not None and _is_settled(connection, row):
        execute(connection, f"DELETE FROM {LIVE_PART} WHERE id = %s", [position])
        return None
    _record(alias, [row])
    return position


@lru_cache(maxsize=64)
def _prepared(statement: str) -> PreparedStatement:
    """Prepared for its parameters: first the given columns, then instants or seconds."""
    types = list((_GIVEN | {"headers": "jsonb"}).values())
    types += ["unknown"] * (statement.count("%s") - len(types))
    return PreparedStatement(f"outbox_insert_{zlib.crc32(statement.encode())}", types, numbered(statement))


def _is_settled(connection: BaseDatabaseWrapper, row: NewRow) -> bool:
    """Has a message in history, which the index of live messages does not cover, the id of this one?"""
    query = f"SELECT 1 FROM {HISTORY} WHERE message_id = %s LIMIT 1"
    return is_postgresql(connection) and bool(fetch(connection, query, [row.message_id]))


def insert_many(alias: str, rows: Sequence[NewRow]) -> list[int]:
    """Insert many messages, which have their names if they are unique; their positions in the order of `rows`."""
    if len(rows) == 1:
        return [cast("int", insert(alias, rows[0]))]
    connection = connections[alias]
    with connection.cursor() as cursor:
        if len(rows) >= _COPIED_FROM and is_postgresql(connection) and hasattr(cursor, "copy"):  # psycopg 3 has it
            inserted = _copy(connection, cursor, rows)
        else:
            positions: dict[uuid.UUID, int] = {}
            for chunk in chunks(rows, _INSERT_CHUNK):
                values, parameters = zip(*(_values(connection, row) for row in chunk), strict=True)
                cursor.execute(
                    f"INSERT INTO {live(connection)} {_INTO} {', '.join(values)} RETURNING id, message_id",
                    [parameter for some in parameters for parameter in some],
                )
                positions.update((as_uuid(message_id), position) for position, message_id in cursor.fetchall())
            inserted = [positions[row.message_id] for row in rows]
    _record(alias, rows)
    return inserted


def _record(alias: str, rows: Sequence[NewRow]) -> None:
    """Record the insert of these messages. It is not a decision, because the rows show it as long as they exist."""
    if is_recorded(decision=False):
        for state in {row.state for row in rows}:
            record(alias, [row.message_id for row in rows if row.state == state], was="", became=state, reason="")


def _copy(connection: BaseDatabaseWrapper, cursor: Any, rows: Sequence[NewRow]) -> list[int]:
    """A COPY returns no rows, so the positions are drawn, and the database's clock is read, before it."""
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
    given = list(_given(row))
    given[_HEADERS] = "\x01" + row.headers  # jsonb in binary form: the number of its format, and its text
    expires_at = available_at + row.expires_in if row.expires_in else None
    ready_position = position if row.priority else 0
    return position, *given, 0, "", created_at, deliver_at, available_at, expires_at, row.state, ready_position


def _values(connection: BaseDatabaseWrapper, row: NewRow) -> tuple[str, list[Any]]:
    """The row as an item of a VALUES list, and its parameters."""
    given: list[Any] = [stored(connection, row.message_id), *_given(row)[1:]]
    created, after = _now(connection), now_after(connection)
    due: Any = row.deliver_at or row.delay or timedelta()
    adapt: Any = connection.ops.adapt_datetimefield_value if row.deliver_at else timedelta.total_seconds
    instant = "%s" if row.deliver_at else after
    deliver_at, available_at, expires_at = "NULL", created, "NULL"
    if due:
        deliver_at = available_at = instant
        given += [adapt(due)] * (2 if row.check_after is None else 1)
    if row.check_after is not None:
        available_at = after
        given.append(row.check_after.total_seconds())
    if row.expires_in:
        expires_at = instant
        given.append(adapt(due + row.expires_in))
    ready_position = DRAWN[connection.vendor] if row.priority else "0"
    return _item(created, deliver_at, available_at, expires_at, row.state, ready_position), given


def _now(connection: BaseDatabaseWrapper) -> str:
    # An addition of 0 seconds, as in now_after(), takes a fifth of the time of the whole INSERT.
    return "statement_timestamp()" if is_postgresql(connection) else now(connection)


@lru_cache(maxsize=64)
def _item(created_at: str, deliver_at: str, available_at: str, expires_at: str, state: str, ready_position: str) -> str:
    instants = f"{created_at}, {deliver_at}, {available_at}, {expires_at}"
    return f"({', '.join(['%s'] * len(_GIVEN))}, 0, '', {instants}, '{state}', {ready_position})"
