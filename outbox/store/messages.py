"""The messages of a batch: how a row is read, what a transport sends for it, and in which order.

Confirms of a pipelined batch arrive out of order, so two messages of one key must not be in flight together: if the first is
nacked and the second confirmed, their order is lost. The k-th message of every key belongs to the k-th *wave*. A wave is sent
after the broker has answered the previous one. Messages without a key have no order, and are all in the first wave.
"""

import json
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from exactly_once.sql.connections import fetch, is_postgresql
from exactly_once.sql.days import FIRST_DAY
from exactly_once.transport.interface import OutgoingMessage
from exactly_once.wire.envelope import REPLAY_HEADER, Envelope
from exactly_once.wire.text import describe
from outbox.conf import OutboxOptions
from outbox.states import HOLDING_KEY
from outbox.store.dialect import HISTORY, LIVE_TABLE, TABLE, any_of, seconds_until
from outbox.store.ready_index import equals

RELAY_COMMENT = "/* pass of a relay */ "
"""Begins the statements that return bodies, so that another relay recognises them."""
BATCH_BYTES = 8 * 1024 * 1024
"""Of the bodies of one batch together. A lane of a relay needs about four times as much memory."""
_UNBOUNDED_BYTES = 2**62
VERSION = "CAST(m.xmin AS text)"
"""The transaction that has written this version of the row, on PostgreSQL."""
_UUID_LENGTH = 36
_SHOWN = 100
_NAMES = ("topic", "biz_id", "key", "correlation_id", "causation_id", "traceparent")


class DamagedRow(ValueError):
    """A column has a value that `publish()` never writes, so the message cannot be sent. The text names column and value."""


class RelayedMessage(NamedTuple):
    """A ready row that a relay has claimed.

    The values are as the database returned them, and are parsed on first use. So a row that was damaged by hand can be read
    together with others; `require_undamaged` and the parsed values raise `DamagedRow`.

    Attributes:
        position: the row's id.
        attempts: failed or successful attempts before this one.
        expires_in_seconds: counted from when it was read; None if it never expires.
        is_blocked: an earlier message of its key is retrying, dead, paused or waiting, so it must not be sent yet.
        ready_position: drawn when it became ready, if it is in the secondary ready index; 0 if it is in the stream.
        wire: the wire format of another protocol (`exactly_once.wire.formats`), or None.
        unread_bytes: the size of a large body that has not been read, or None. No claimed message has one.
        version: differs after each change of the row; always the same on SQLite, where no other transaction writes meanwhile.
        place: where the database has stored this version of the row; "" on SQLite.
        error_class: of its last failure, see `settling.Failure`; "" if it has not failed since it was published.
    """

    position: int
    shard: int
    id: str
    topic: str
    biz_id: str
    key: str
    priority: int
    body: bytes
    headers_json: str
    correlation_id: str
    causation_id: str
    traceparent: str
    attempts: int
    created: str
    deliver: str | None
    expires_in_seconds: float | None
    is_blocked: bool
    ready_position: int
    wire: str | None = None
    unread_bytes: int | None = None
    version: str = ""
    place: str = ""
    error_class: str = ""

    @property
    def message_id(self) -> uuid.UUID:
        return uuid.UUID(self.id)

    @property
    def expired(self) -> bool:
        """Had it expired when it was read?"""
        return self.expires_within(0.0)

    def expires_within(self, seconds: float) -> bool:
        """Does it expire within this time after it was read?"""
        return self.expires_in_seconds is not None and self.expires_in_seconds <= seconds

    @property
    def headers(self) -> Mapping[str, Any]:
        if self.headers_json == "{}":
            return {}
        try:
            headers = json.loads(self.headers_json)
        except (ValueError, RecursionError) as error:
            raise DamagedRow(f"headers cannot be decoded ({describe(error)})") from error
        if not isinstance(headers, dict):
            raise DamagedRow(f"headers are {self.headers_json[:_SHOWN]}, which is not a JSON object")
        return headers

    @property
    def created_at(self) -> datetime:
        return _instant(self.created)

    @property
    def deliver_at(self) -> datetime | None:
        return _instant(self.deliver) if self.deliver is not None else None

    def require_undamaged(self) -> None:
        """Check the values that sending does not parse.

        Raises:
            DamagedRow: the message cannot be sent.
        """
        if len(self.id) != _UUID_LENGTH:
            raise DamagedRow(f"message_id is {self.id[:_SHOWN]!r}, which is not a UUID")


HOLDING = ", ".join(f"'{state}'" for state in HOLDING_KEY)


def select(vendor: str, small: object = _UNBOUNDED_BYTES) -> str:
    """The fields of a `RelayedMessage`: columns, or expressions. Bodies of more than `small` bytes are not read."""
    on_postgresql = vendor == "postgresql"
    read_as = {
        "position": "m.id",
        "id": "CAST(m.message_id AS text)",
        "body": f"CASE WHEN length(m.body) <= {small} THEN m.body END",
        "headers_json": "CAST(m.headers AS text)",
        "created": "CAST(m.created_at AS text)",
        "deliver": "CAST(m.deliver_at AS text)",
        "expires_in_seconds": seconds_until(vendor, "m.expires_at"),
        "is_blocked": _is_blocked(vendor),
        "unread_bytes": f"CASE WHEN length(m.body) > {small} THEN length(m.body) END",
        "version": VERSION if on_postgresql else "''",
        "place": "CAST(m.ctid AS text)" if on_postgresql else "''",
    }
    return f"SELECT {', '.join(read_as.get(name, f'm.{name}') for name in RelayedMessage._fields)}"


def _is_blocked(vendor: str) -> str:
    return (
        f"m.key <> '' AND COALESCE((SELECT true FROM {LIVE_TABLE[vendor]} e WHERE e.key {equals(vendor, 'm.key')} "
        f"AND e.id < m.id AND e.key <> '' AND e.state IN ({HOLDING}) ORDER BY e.key, e.id LIMIT 1), false)"
    )


def outgoing(row: RelayedMessage, options: OutboxOptions, *, replayed: bool = False, queue: str = "") -> OutgoingMessage:
    """The message of `row`.

    Args:
        replayed: an operator has it sent again. A restored message says so in its headers.
        queue: see `OutgoingMessage`.

    Raises:
        DamagedRow: it cannot be sent.
    """
    row.require_undamaged()
    headers = dict(row.headers)
    restored = headers.pop(REPLAY_HEADER, None) is not None
    return OutgoingMessage(
        position=row.position,
        priority=row.priority,
        wire=row.wire,
        expires_in_seconds=row.expires_in_seconds,
        queue=queue,
        exchange=options.topic(row.topic).EXCHANGE if options.TOPICS else "",
        envelope=Envelope(
            id=row.id,
            topic=row.topic,
            source=options.source,
            created_at=row.created_at,
            deliver_at=row.deliver_at,
            biz_id=row.biz_id,
            key=row.key,
            correlation_id=row.correlation_id,
            causation_id=row.causation_id,
            traceparent=row.traceparent,
            body=row.body,
            headers=headers,
            replayed=replayed or restored,
        ),
    )


def waves(batch: Iterable[RelayedMessage]) -> list[list[RelayedMessage]]:
    """Split `batch`, which is in sending order, into waves."""
    split: list[list[RelayedMessage]] = []
    seen: dict[str, int] = {}
    for message in batch:
        wave = 0
        if message.key:
            wave = seen.get(message.key, 0)
            seen[message.key] = wave + 1
        if wave == len(split):
            split.append([])
        split[wave].append(message)
    return split


def in_order(rows: Sequence[RelayedMessage], free: Collection[int]) -> list[RelayedMessage]:
    """The rows that are `free`, without those behind a row of their key that is not: they must not overtake it."""
    stopped: set[str] = set()
    claimed: list[RelayedMessage] = []
    for row in rows:
        if row.position not in free:
            stopped.add(row.key)
        elif not row.key or row.key not in stopped:
            claimed.append(row)
    return claimed


def read_published(alias: str, positions: Sequence[int]) -> list[RelayedMessage]:
    """The published messages at these positions, in the order of publishing. They are not locked."""
    connection = connections[alias]
    return fetch_messages(connection, *_published(connection, f"{RELAY_COMMENT}{select(connection.vendor)}", positions))


def parts_of_published(alias: str, positions: Sequence[int]) -> list[list[int]]:
    """The positions in parts whose bodies have at most `BATCH_BYTES` together, or of one message."""
    connection = connections[alias]
    sizes = dict(fetch(connection, *_published(connection, "SELECT m.id, length(m.body)", positions)))
    parts: list[list[int]] = []
    total = BATCH_BYTES
    for position in positions:
        total += (size := sizes.get(position, 0))
        if total > BATCH_BYTES or not parts:
            parts.append([])
            total = size
        parts[-1].append(position)
    return parts


def _published(connection: BaseDatabaseWrapper, select: str, positions: Sequence[int]) -> tuple[str, list[Any]]:
    condition, among = any_of(connection, positions)
    # The range is for the BRIN index of history.
    return (
        f"{select} FROM {HISTORY if is_postgresql(connection) else TABLE} m WHERE m.state = 'published' "
        f"AND m.day >= {FIRST_DAY} AND m.id BETWEEN %s AND %s AND m.id {condition} ORDER BY m.id"
    ), [min(positions), max(positions), among]


def fetch_messages(connection: BaseDatabaseWrapper, query: str, parameters: Sequence[Any]) -> list[RelayedMessage]:
    """The messages of a query that begins with `select`."""
    found = fetch(connection, query, parameters)
    return list(map(RelayedMessage._make, map(_with_bytes if is_postgresql(connection) else _from_sqlite, found)))


def _with_bytes(row: Sequence[Any]) -> tuple[Any, ...]:
    """psycopg 2 returns a memoryview."""
    return tuple(bytes(value) if isinstance(value, memoryview) else value for value in row)


def _from_sqlite(row: Sequence[Any]) -> Sequence[Any]:
    """Convert the values to the types of the columns. SQLite stores a value of any type that was written by hand."""
    values = dict(zip(RelayedMessage._fields, row, strict=True))
    values.update(id=_uuid_text(values["id"]), body=as_bytes(values["body"]))
    values["is_blocked"] = bool(values["is_blocked"])
    values.update({name: str(values[name]) for name in _NAMES})
    return list(values.values())


def _uuid_text(value: str) -> str:
    try:
        return str(uuid.UUID(value))
    except ValueError:
        return value


def as_bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _instant(text: str) -> datetime:
    instant = datetime.fromisoformat(text)
    return instant.astimezone(UTC) if instant.tzinfo else instant.replace(tzinfo=UTC)
