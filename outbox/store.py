"""All SQL of the outbox. Every function is named for its transition and carries its guard.

Two databases are spoken to, PostgreSQL and SQLite, and they differ in one thing that matters: who may relay.

- On PostgreSQL relays are equals. A pass takes transaction-scoped advisory locks on some *shards*; the server frees them the
  moment the transaction or the connection ends, so a killed relay holds nothing and a relay that overslept finds its
  transaction gone. Nothing here outlives a transaction, so a transaction-pooling proxy may stand in between.
- SQLite has one writer. There one relay holds a *lease* with a token, and works in short transactions so that the write lock
  is never held while a broker is waited for.
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import OperationalError, connections, transaction
from django.db.models import Count, F, Min, Q

from outbox.kernel.clock import DatabaseTime, now_after
from outbox.kernel.databases import lock_timeout
from outbox.kernel.faults import is_collision
from outbox.kernel.identity import process_name
from outbox.kernel.text import ERROR_LENGTH, NAME_LENGTH, printable
from outbox.models import HOLDING_KEY, SETTLED, SHARDS, OutboxMessage, RelayLease, State

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_T = TypeVar("_T")

TABLE = OutboxMessage._meta.db_table
SHARDS_PER_PASS = 16
"""Most shards one pass takes, so that several relays find work side by side."""

_LOCK_SPACE = zlib.crc32(TABLE.encode()) - 2**31
_INSERT_CHUNK = 500
_OPERATORS_WAIT = timedelta(seconds=10)


# ---------------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRow:
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


def shard_of(row: NewRow) -> int:
    """The slice a message belongs to: by its key, so that one relay at a time has all of a key's messages."""
    return zlib.crc32(row.key.encode() or row.message_id.bytes) % SHARDS


_COLUMNS = (
    "message_id, topic, biz_id, is_unique, key, shard, priority, body, headers, correlation_id, causation_id, traceparent, "
    "attempts, last_error, created_at, deliver_at, available_at, expires_at, state"
)


def insert(alias: str, row: NewRow) -> int | None:
    """Write one message; its position, or None when `is_unique` found an earlier row."""
    connection = connections[alias]
    values, parameters = _values(connection, row)
    conflict = "ON CONFLICT (topic, biz_id) WHERE is_unique DO NOTHING" if row.is_unique else ""
    with connection.cursor() as cursor:
        cursor.execute(f"INSERT INTO {TABLE} ({_COLUMNS}) VALUES {values} {conflict} RETURNING id", parameters)
        found = cursor.fetchall()
    return found[0][0] if found else None


def insert_many(alias: str, rows: Sequence[NewRow]) -> list[int]:
    """Write many messages, none of them unique; their positions in the order of `rows`."""
    connection = connections[alias]
    positions: dict[uuid.UUID, int] = {}
    for chunk in _chunks(rows, _INSERT_CHUNK):
        values, parameters = zip(*(_values(connection, row) for row in chunk), strict=True)
        with connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {TABLE} ({_COLUMNS}) VALUES {', '.join(values)} RETURNING id, message_id",
                [parameter for some in parameters for parameter in some],
            )
            positions.update((_uuid(message_id), position) for position, message_id in cursor.fetchall())
    return [positions[row.message_id] for row in rows]


def find_unique(alias: str, topic: str, biz_id: str) -> tuple[uuid.UUID, int] | None:
    """Message id and position of the row that `insert` found in its way; None when it is gone meanwhile."""
    return (
        OutboxMessage.objects.using(alias)
        .filter(topic=topic, biz_id=biz_id, is_unique=True)
        .values_list("message_id", "id")
        .first()
    )


def _values(connection: BaseDatabaseWrapper, row: NewRow) -> tuple[str, list[Any]]:
    parameters: list[Any] = [
        row.message_id if connection.features.has_native_uuid_field else row.message_id.hex,
        row.topic,
        row.biz_id,
        row.is_unique,
        row.key,
        shard_of(row),
        row.priority,
        row.body,
        row.headers,
        row.correlation_id,
        row.causation_id,
        row.traceparent,
    ]
    places = ["%s"] * len(parameters) + ["0", "''"]

    def instant(after: timedelta | None, absolute: datetime | None = None) -> str:
        if absolute is not None:
            parameters.append(connection.ops.adapt_datetimefield_value(absolute))
            return "%s"
        parameters.append((after or timedelta()).total_seconds())
        return now_after(connection)

    delayed = bool(row.delay) or row.deliver_at is not None
    places.append(instant(None))
    places.append(instant(row.delay, row.deliver_at) if delayed else "NULL")
    places.append(instant(row.delay, row.deliver_at))
    if row.expires_in is None:
        places.append("NULL")
    else:
        until = row.deliver_at + row.expires_in if row.deliver_at else None
        places.append(instant((row.delay or timedelta()) + row.expires_in, until))
    places.append(f"'{State.SCHEDULED if delayed else State.READY}'")
    return f"({', '.join(places)})", parameters


# ------------------------------------------------------------------------------------------------------- a pass of the relay


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayedMessage:
    """A ready row in the hands of one relay.

    Attributes:
        position: the row's id.
        attempts: failed or successful tries before this one.
        expired: it may not be sent any more.
    """

    position: int
    message_id: uuid.UUID
    topic: str
    biz_id: str
    key: str
    priority: int
    body: bytes
    headers: Mapping[str, Any]
    correlation_id: str
    causation_id: str
    traceparent: str
    attempts: int
    created_at: datetime
    deliver_at: datetime | None
    expired: bool


_READ = (
    "m.id, m.message_id, m.topic, m.biz_id, m.key, m.priority, m.body, m.headers, m.correlation_id, m.causation_id, "
    "m.traceparent, m.attempts, m.created_at, m.deliver_at, COALESCE(m.expires_at <= {now}, {false})"
)
_HOLDING = ", ".join(f"'{state}'" for state in HOLDING_KEY)
_READY = (
    "m.state = 'ready' AND (m.key = '' OR NOT EXISTS (SELECT 1 FROM {table} e WHERE e.key = m.key AND e.id < m.id "
    f"AND e.key <> '' AND e.state IN ({_HOLDING})))"
).format(table=TABLE)
"""May be sent now: ready, and no earlier message of its key is in trouble."""

_IN_ORDER = "ORDER BY m.priority DESC, m.id LIMIT %s"
_BUSY_SHARDS = (
    "WITH RECURSIVE shards(shard) AS (SELECT 0 UNION ALL SELECT shard + 1 FROM shards WHERE shard < {last}), "
    f"busy AS {{materialized}} (SELECT shard FROM shards WHERE EXISTS (SELECT 1 FROM {TABLE} m WHERE m.shard = shards.shard "
    f"AND {_READY}) ORDER BY random()) SELECT shard FROM busy "
)


def claims_by_locks(alias: str) -> bool:
    """Do several relays share this database (PostgreSQL), or does one hold a lease on it (SQLite)?"""
    return connections[alias].vendor == "postgresql"


def has_work(alias: str) -> bool:
    """Is anything ready or due? Read only: an idle relay must not take SQLite's write lock, nor open transactions."""
    connection = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute(
            # In the order of their indexes, because a bare EXISTS may be planned as a scan of everything published.
            f"SELECT (SELECT 1 FROM {TABLE} WHERE state = 'ready' ORDER BY shard, priority DESC, id LIMIT 1) IS NOT NULL "
            f"OR (SELECT 1 FROM {TABLE} WHERE state IN ('scheduled', 'retrying') AND available_at <= {_now(connection)} "
            "ORDER BY available_at LIMIT %s) IS NOT NULL",
            [1],
        )
        found: tuple[Any] = cursor.fetchone()
    return bool(found[0])


def bound_transaction(alias: str, longest: timedelta) -> None:
    """Let the server end the open transaction when its owner sleeps or hangs: a zombie relay must not settle anything.

    Its first statement, which also sees to the isolation level: with REPEATABLE READ the claim's two statements would share
    a snapshot, whatever the project's default is.
    """
    # Inside the transaction of a test it would outlive the pass.
    if connections[alias].vendor != "postgresql" or len(connections[alias].atomic_blocks) > 1:
        return
    span = int(longest.total_seconds() * 1000)
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; "
            f"SET LOCAL idle_in_transaction_session_timeout = {span}; "
            f"SET LOCAL statement_timeout = {span}; SET LOCAL lock_timeout = {span}"
        )


def claim_ready(alias: str, limit: int) -> list[RelayedMessage]:
    """Take free shards that have work, for the rest of the open transaction, and read their ready rows.

    Two statements on purpose: a snapshot taken before the locks could still show rows that the shards' previous holder has
    published meanwhile. The order is the order to send in: by priority, then by position.
    """
    connection = connections[alias]
    shards = _lock_busy_shards(connection)
    if not shards:
        return []
    per_shard = max(limit // len(shards), 1)
    columns = _read_columns(connection)
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                f"SELECT m.* FROM unnest(%s::int[]) AS s(shard) CROSS JOIN LATERAL (SELECT {columns} FROM {TABLE} m "
                f"WHERE m.shard = s.shard AND {_READY} {_IN_ORDER}) m",
                [shards, per_shard],
            )
            found = cursor.fetchall()
        else:
            found = []
            for shard in shards:
                cursor.execute(
                    f"SELECT {columns} FROM {TABLE} m WHERE m.shard = %s AND {_READY} {_IN_ORDER}", [shard, per_shard]
                )
                found += cursor.fetchall()
    rows = [_relayed(row) for row in found]
    rows.sort(key=lambda row: (-row.priority, row.position))
    return rows[:limit]


def _lock_busy_shards(connection: BaseDatabaseWrapper) -> list[int]:
    postgresql = connection.vendor == "postgresql"
    sql = _BUSY_SHARDS.format(last=SHARDS - 1, materialized="MATERIALIZED" if postgresql else "")
    # On SQLite the writer's lock of the open transaction, or the lease, already covers every shard.
    condition = f"WHERE pg_try_advisory_xact_lock({_LOCK_SPACE}, shard) " if postgresql else ""
    with connection.cursor() as cursor:
        cursor.execute(f"{sql}{condition}LIMIT {SHARDS_PER_PASS}")
        return [shard for (shard,) in cursor.fetchall()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A failed attempt, to be written down.

    Attributes:
        retry_after: rest until the next attempt; None when it was the last.
    """

    position: int
    error: str
    retry_after: timedelta | None


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """What became of a batch: positions by outcome. A row named nowhere stays ready and is sent again."""

    published: Sequence[int] = ()
    expired: Sequence[int] = ()
    failed: Sequence[Failure] = ()


def settle(alias: str, settlement: Settlement) -> int:
    """ready → published | expired | retrying | dead, inside the claim; how many rows changed."""
    ready = OutboxMessage.objects.using(alias).filter(state=State.READY)
    changed = 0
    for chunk in _chunks(settlement.published, _INSERT_CHUNK):
        changed += ready.filter(pk__in=chunk).update(
            state=State.PUBLISHED, attempts=F("attempts") + 1, settled_at=DatabaseTime(), last_error=""
        )
    for chunk in _chunks(settlement.expired, _INSERT_CHUNK):
        changed += ready.filter(pk__in=chunk).update(state=State.EXPIRED, settled_at=DatabaseTime())
    for failure in settlement.failed:
        written = {"attempts": F("attempts") + 1, "last_error": printable(failure.error, ERROR_LENGTH)}
        if failure.retry_after is None:
            changed += ready.filter(pk=failure.position).update(state=State.DEAD, settled_at=DatabaseTime(), **written)
        else:
            changed += ready.filter(pk=failure.position).update(
                state=State.RETRYING, available_at=DatabaseTime(failure.retry_after), **written
            )
    return changed


def promote_due(alias: str, limit: int) -> int:
    """scheduled | retrying → ready for rows whose time has come; how many."""
    connection = connections[alias]
    skip_locked = "FOR UPDATE SKIP LOCKED" if connection.vendor == "postgresql" else ""
    now = _now(connection)
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {TABLE} SET state = 'ready' WHERE state IN ('scheduled', 'retrying') AND id IN (SELECT id FROM {TABLE} "
            f"WHERE state IN ('scheduled', 'retrying') AND available_at <= {now} ORDER BY available_at LIMIT %s {skip_locked})",
            [limit],
        )
        promoted: int = cursor.rowcount
    return promoted


# ------------------------------------------------------------------------------------------------------------ SQLite's lease


class LeaseLost(Exception):
    """Another relay took over while this one was away; what it has in hand is not its own any more."""


class Lease:
    """The right to relay on a database with one writer, until an instant; renewed by every claim.

    The token fences: a relay that overslept its lease settles nothing, because settling asks for the token first.
    """

    NAME = "relay"

    def __init__(self, alias: str, span: timedelta) -> None:
        self._alias = alias
        self._span = span
        self._token = uuid.uuid4()

    def claim(self, limit: int) -> list[RelayedMessage] | None:
        """Renew or take the lease and read ready rows; None while another relay holds it."""
        with transaction.atomic(using=self._alias, durable=True):
            if not self._take():
                return None
            rows = claim_ready(self._alias, limit)
            self._rows().update(in_hand=[row.position for row in rows])
            return rows

    def settle(self, settlement: Settlement) -> int:
        """`settle`, if the lease is still ours.

        Raises:
            LeaseLost: it is not; nothing was written.
        """
        with transaction.atomic(using=self._alias, durable=True):
            if not self._rows().filter(token=self._token, expires_at__gt=DatabaseTime()).update(in_hand=[]):
                raise LeaseLost
            return settle(self._alias, settlement)

    def release(self) -> None:
        """Let the next relay begin at once."""
        self._rows().filter(token=self._token).delete()

    def holder(self) -> str:
        return self._rows().values_list("holder", flat=True).first() or "nobody"

    def _take(self) -> bool:
        mine = {"token": self._token, "holder": process_name()[:NAME_LENGTH], "expires_at": DatabaseTime(self._span)}
        free = Q(token=self._token) | Q(expires_at__lte=DatabaseTime())
        if self._rows().filter(free).update(**mine):
            return True
        _, created = RelayLease.objects.using(self._alias).get_or_create(name=self.NAME, defaults=mine)
        return created

    def _rows(self) -> Any:
        return RelayLease.objects.using(self._alias).filter(name=self.NAME)


# ---------------------------------------------------------------------------------------------------------------- operators

CANCELLABLE = (State.SCHEDULED, State.READY, State.RETRYING, State.DEAD)
REQUEUEABLE = (State.DEAD, State.RETRYING)


def cancel(alias: str, position: int) -> bool:
    """scheduled | ready | retrying | dead → cancelled: no relay sends it any more. False: too late, or in a relay's hands.

    A message whose last outcome is unknown may be in the broker already; that is in nobody's power.
    """
    try:
        with transaction.atomic(using=alias), lock_timeout(alias, _OPERATORS_WAIT):
            if _in_hand(alias, position):
                return False
            cancellable = OutboxMessage.objects.using(alias).filter(pk=position, state__in=CANCELLABLE)
            return bool(cancellable.update(state=State.CANCELLED, settled_at=DatabaseTime()))
    except OperationalError as error:
        if is_collision(error):
            return False
        raise


def requeue(alias: str, position: int) -> bool:
    """dead | retrying → ready, with a full set of attempts. False: it is in neither of these states."""
    return bool(
        OutboxMessage.objects.using(alias)
        .filter(pk=position, state__in=REQUEUEABLE)
        .update(state=State.READY, attempts=0, available_at=DatabaseTime(), settled_at=None)
    )


def _in_hand(alias: str, position: int) -> bool:
    """Does a relay have this row right now? If not, none will take it until the open transaction ends."""
    connection = connections[alias]
    if connection.vendor == "postgresql":
        # A waiting lock request makes every later try-lock fail, so even a busy relay lets us in after its pass.
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT pg_advisory_xact_lock({_LOCK_SPACE}, shard) FROM {TABLE} WHERE id = %s", [position])
        return False
    lease = RelayLease.objects.using(alias).filter(expires_at__gt=DatabaseTime()).first()
    return lease is not None and position in lease.in_hand


def states(alias: str) -> dict[str, int]:
    """How many rows are in each state; every state is named."""
    counted = dict(OutboxMessage.objects.using(alias).values_list("state").annotate(Count("id")).order_by())
    return {state.value: counted.get(state, 0) for state in State}


def oldest_waiting(alias: str) -> datetime | None:
    """The due time of the message that has waited longest past it, or None when none waits."""
    waiting = OutboxMessage.objects.using(alias).filter(
        Q(state=State.READY) | Q(state__in=[State.SCHEDULED, State.RETRYING], available_at__lte=DatabaseTime())
    )
    oldest: datetime | None = waiting.aggregate(oldest=Min("available_at"))["oldest"]
    return oldest


def purge_settled(alias: str, older_than: timedelta, *, chunk: int = 1000) -> Iterator[int]:
    """Delete settled rows older than `older_than`, in small transactions; yields how many went with each.

    Dead messages stay until a person has decided.
    """
    old = OutboxMessage.objects.using(alias).filter(state__in=SETTLED, settled_at__lt=DatabaseTime(-older_than))
    while ids := list(old.order_by("settled_at").values_list("pk", flat=True)[:chunk]):
        yield OutboxMessage.objects.using(alias).filter(pk__in=ids, state__in=SETTLED).delete()[0]


def purgeable(alias: str, older_than: timedelta) -> int:
    """How many rows `purge_settled` would delete."""
    return OutboxMessage.objects.using(alias).filter(state__in=SETTLED, settled_at__lt=DatabaseTime(-older_than)).count()


# ------------------------------------------------------------------------------------------------------------------ columns


def _now(connection: BaseDatabaseWrapper) -> str:
    return now_after(connection).replace("%s", "0")


def _read_columns(connection: BaseDatabaseWrapper) -> str:
    return _READ.format(now=_now(connection), false="false" if connection.vendor == "postgresql" else "0")


def _relayed(row: Sequence[Any]) -> RelayedMessage:
    return RelayedMessage(
        position=row[0],
        message_id=_uuid(row[1]),
        topic=row[2],
        biz_id=row[3],
        key=row[4],
        priority=row[5],
        body=bytes(row[6]),
        headers=json.loads(row[7]),
        correlation_id=row[8],
        causation_id=row[9],
        traceparent=row[10],
        attempts=row[11],
        created_at=_instant(row[12]),
        deliver_at=_instant(row[13]) if row[13] else None,
        expired=bool(row[14]),
    )


def _uuid(value: uuid.UUID | str) -> uuid.UUID:
    return value if isinstance(value, uuid.UUID) else uuid.UUID(value)


def _instant(value: datetime | str) -> datetime:
    # SQLite gives text, or a naive datetime where a column's declared type tells its driver to parse it.
    instant = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    return instant if instant.tzinfo else instant.replace(tzinfo=UTC)


def _chunks(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
