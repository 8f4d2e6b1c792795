"""The queries of a pass: which shards have work, and the ready messages of the shards that it has locked.

Ready messages are in two partial indexes. The *stream* contains those that were ready when they were inserted and have no
priority. The *secondary ready index* contains all others (prioritised, once delayed, retried, released). A message of the
stream has its position since it is ready; each other one draws another number of the same sequence when it becomes ready. A
reader keeps a *floor* in that sequence, and skips what became ready below it: the dead versions of published messages. The
stream grows only at its end, so it is read from the floor upwards. Of the secondary ready index, which has another order, the
entries below the floor are passed over without reading their rows.
"""

import json
import math
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from exactly_once.process.clock import monotonic
from exactly_once.sql.connections import READ_COMMITTED, execute, fetch, is_postgresql
from exactly_once.sql.days import FIRST_DAY
from exactly_once.sql.now import NOW_AFTER, now
from exactly_once.sql.prepared_statements import KEEP_PLANS, PreparedStatement, execute_script, is_usable
from exactly_once.wire.text import describe
from outbox.models import SHARDS, PendingCallback, TrailEntry
from outbox.states import HOLDING_KEY
from outbox.store.dialect import (
    DO_NOT_WAIT_FOR_THE_DISK,
    EVER,
    HISTORY,
    LIVE_PART,
    LOCK_SPACE,
    PAUSED_TOPICS,
    TABLE,
    any_of,
    array_of,
    bounds,
    live,
    places,
)

STREAM = "m.state = 'ready' AND m.ready_position = 0"
SECONDARY = "m.state = 'ready' AND m.ready_position > 0"
_IS_BLOCKED = (
    "m.key <> '' AND COALESCE((SELECT true FROM {{live}} e WHERE e.key {{is_key}} AND e.id < m.id AND e.key <> '' "
    "AND e.state IN ({states}) ORDER BY e.key, e.id LIMIT 1), false)"
).format(states=", ".join(f"'{state}'" for state in HOLDING_KEY))


class DamagedRow(ValueError):
    """A column has a value that `publish()` never writes, so the message cannot be sent. The text names column and value."""


class RelayedMessage(NamedTuple):
    """A ready row that a relay has claimed.

    The values are as the database returned them, and are parsed on first use. So a row that was damaged by hand can be read
    together with others; `require_undamaged` and the parsed values raise `DamagedRow`.

    Attributes:
        position: the row's id.
        attempts: failed or successful attempts before this one.
        expires_in_seconds: counted from when it was read; None if it never expires, infinite if `expires_at` is damaged.
        is_blocked: an earlier message of its key is retrying, dead, paused or waiting, so it must not be sent yet.
        ready_position: drawn when it became ready, if it is in the secondary ready index; 0 if it is in the stream.
        wire: the wire format of another protocol (`exactly_once.wire.formats`), or None.
        unread_bytes: the size of a large body that has not been read, or None. No claimed message has one.
        version: differs after each change of the row; always the same on SQLite, where no other transaction writes meanwhile.
        place: where the database has stored this version of the row; "" on SQLite.
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
        return _instant("created_at", self.created)

    @property
    def deliver_at(self) -> datetime | None:
        return _instant("deliver_at", self.deliver) if self.deliver is not None else None

    def require_undamaged(self) -> None:
        """Check the values that sending does not parse.

        Raises:
            DamagedRow: the message cannot be sent.
        """
        if self.expires_in_seconds is not None and not math.isfinite(self.expires_in_seconds):
            raise DamagedRow("expires_at is not an instant")
        if self.priority > _HIGHEST_PRIORITY:
            raise DamagedRow(f"priority is {self.priority}, and no broker takes more than {_HIGHEST_PRIORITY}")
        if len(self.id) != _UUID_LENGTH:
            raise DamagedRow(f"message_id is {self.id[:_SHOWN]!r}, which is not a UUID")


_UUID_LENGTH = 36
_HIGHEST_PRIORITY = 255
"""AMQP encodes it as one octet."""
_SHOWN = 100
_NAMES = ("topic", "biz_id", "key", "correlation_id", "causation_id", "traceparent")
_LONGEST_WAIT_FOR_A_LOCK = 1000
"""In milliseconds. A pass skips the shards and rows that another session has locked; it waits for locks of tables."""
_READ_AS = {
    "position": "m.id",
    "id": "CAST(m.message_id AS text)",
    "headers_json": "CAST(m.headers AS text)",
    "created": "CAST(m.created_at AS text)",
    "deliver": "CAST(m.deliver_at AS text)",
    "expires_in_seconds": "{expires_in}",
    "is_blocked": _IS_BLOCKED,
    "body": "CASE WHEN length(m.body) <= {small} THEN m.body END",
    "unread_bytes": "CASE WHEN length(m.body) > {small} THEN length(m.body) END",
    "version": "{{version}}",
    "place": "{{place}}",
}
_VERSION = "CAST(m.xmin AS text)"
"""The transaction that has written this version of the row."""
_PLACE = "CAST(m.ctid AS text)"
_SELECTED = f"SELECT {', '.join(_READ_AS.get(name, f'm.{name}') for name in RelayedMessage._fields)}"
"""The fields of a `RelayedMessage`: columns of that name, or an expression."""
_EXPIRES_IN_SECONDS = (
    "CASE WHEN m.expires_at IS NULL THEN NULL WHEN isfinite(m.expires_at) "
    "THEN CAST(EXTRACT(EPOCH FROM m.expires_at - {now}) AS float8) ELSE float8 'infinity' END"
)
"""NULL without an expiry: NULL costs less than any value."""
_EXPIRES_IN_SECONDS_SQLITE = (
    "CASE WHEN m.expires_at IS NOT NULL THEN COALESCE((julianday(m.expires_at) - julianday({now})) * 86400, 9e999) END"
)
_IN_STREAM = f"m.shard {{is_shard}} AND {STREAM} AND m.id > {{above}} ORDER BY m.shard, m.id"
_SECONDARY_ABOVE = f"m.shard {{is_shard}} AND {SECONDARY} AND m.ready_position > {{drawn_above}} ORDER BY m.shard"
_IN_SECONDARY = f"{_SECONDARY_ABOVE}, m.priority DESC, m.id"
_LOOK = (
    "WITH shards(shard, floor) AS ({shards}), retry(seconds, since) AS ("
    "SELECT CASE WHEN m.available_at <= {now} THEN 0 ELSE {retry_in} END, {since} FROM {live} m "
    "WHERE m.state = 'retrying'{not_before} ORDER BY m.available_at, m.id LIMIT 1) SELECT shard, "
    f"(SELECT m.id FROM {{live}} m WHERE {_IN_STREAM} LIMIT 1), "
    f"(SELECT m.ready_position FROM {{live}} m WHERE {_SECONDARY_ABOVE}, m.ready_position LIMIT 1), "
    "(SELECT seconds FROM retry), CAST(COALESCE((SELECT since FROM retry), {recently}) AS text), NULL, NULL, NULL, NULL "
    "FROM shards "
    # The paused topics are read by the same statement, which saves a round trip.
    "UNION ALL SELECT NULL, NULL, NULL, NULL, NULL, p.topic, CAST(p.in_trial AS text), "
    "CASE WHEN p.allowed_at IS NOT NULL THEN 2 WHEN p.is_resuming THEN 1 ELSE 0 END, "
    f"{{probe_in}} FROM {PAUSED_TOPICS} p"
)
_UNTIL = "CASE WHEN isfinite({instant}) THEN CAST(EXTRACT(EPOCH FROM {instant} - {now}) AS float8) END"
_UNTIL_SQLITE = "(julianday({instant}) - julianday({now})) * 86400"


def _look(shards: str, retries_since: str, table: str, at: str) -> str:
    on_postgresql = table == LIVE_PART
    until = _UNTIL if on_postgresql else _UNTIL_SQLITE
    retry_in, probe_in = (until.format(instant=instant, now=at) for instant in ("m.available_at", "p.probe_at"))
    # Two seconds are more than a pass takes from storing a failure to its commit.
    recently = f"{at} - interval '2 seconds'" if on_postgresql else "''"
    return _LOOK.format(
        shards=shards,
        live=table,
        now=at,
        retry_in=retry_in,
        # SQLite has no dead rows to skip.
        not_before=f" AND m.available_at >= {retries_since}" if on_postgresql else "",
        since=f"LEAST(m.available_at, {recently})" if on_postgresql else "''",
        recently=recently,
        probe_in=probe_in,
        is_shard=_equals("shards.shard", indexed=on_postgresql),
        above="shards.floor",
        drawn_above="shards.floor" if on_postgresql else "0",
    )


def _equals(value: object, *, indexed: bool) -> str:
    """The condition "is this value". If `indexed`, only the index that has the rows in their order can return them in it.

    With `=` PostgreSQL knows that the order by (shard, id) is the one by id, which other indexes have, too. A plan of a table
    that is thought to be empty, where all indexes cost the same, must be right when it has a backlog.
    """
    return f"= ANY(ARRAY[{value}])" if indexed else f"= {value}"


def _of_a_shard(
    table: str, expires_in: str, shard: object, above: object, each: str, small: object, not_skipped: str = ""
) -> list[str]:
    """Queries for up to `each` ready messages of a shard `above` its floor: in the secondary index, and in its stream.

    Bodies of more than `small` bytes are not read.
    """
    on_postgresql = table == LIVE_PART
    version, place = (_VERSION, _PLACE) if on_postgresql else ("''", "''")
    select = _select(table, expires_in, small, version=version, place=place)
    is_shard = _equals(shard, indexed=on_postgresql)
    drawn_above = above if on_postgresql else 0
    parts = (part.format(is_shard=is_shard, above=above, drawn_above=drawn_above) for part in (_IN_SECONDARY, _IN_STREAM))
    return [f"{select} FROM {table} m WHERE true{not_skipped} AND {part} LIMIT {each}" for part in parts]


def _select(table: str, expires_in: str, small: object, *, version: str = "''", place: str = "''") -> str:
    is_key = _equals("m.key", indexed=table == LIVE_PART)
    select = _SELECTED.format(expires_in=expires_in, live=table, small=small, is_key=is_key)
    return select.format(version=version, place=place)


def _of_shards(shards: str, floors: str, each: str, small: object, not_skipped: str = "") -> str:
    """The same for several shards in one statement, so that a row that moves from one index to the other is seen in one."""
    of_a_shard = _of_a_shard(LIVE_PART, _EXPIRES_IN_SECONDS.format(now=_NOW), "s.shard", "s.above", each, small, not_skipped)
    parts = " UNION ALL ".join(f"({part})" for part in of_a_shard)
    each_shard = f"unnest({shards}::int[], {floors}::bigint[]) AS s(shard, above)"
    return f"{_RELAY_COMMENT}SELECT m.* FROM {each_shard} CROSS JOIN LATERAL ({parts}) m"


_RELAY_COMMENT = "/* pass of a relay */ "
"""Begins the statements that return bodies, so that another relay recognises them."""
_NOW = NOW_AFTER["postgresql"].replace("%s", "0")
_LOOK_PREPARED = PreparedStatement(
    "outbox_look",
    ["int[]", "bigint[]", "timestamptz"],
    _look("SELECT * FROM unnest($1, $2)", "$3", LIVE_PART, _NOW),
)
_KEEP_PLANS = f"SELECT {KEEP_PLANS}"
_READ_PREPARED = PreparedStatement(
    "outbox_read",
    ["int[]", "bigint[]", "bigint", "bigint"],
    _of_shards("$1", "$2", "$3", "$4"),
    returns_binary=True,
)
_NOT_SKIPPED = " AND m.id <> ALL(%s::bigint[]) AND m.key <> ALL(%s::text[])"
_NOT_SKIPPED_SQLITE = " AND m.id NOT IN (SELECT value FROM json_each(%s)) AND m.key NOT IN (SELECT value FROM json_each(%s))"
_LOCK_ROWS = (
    f"{_RELAY_COMMENT}SELECT m.id, {_VERSION}, CASE WHEN m.id = ANY({{unread}}) THEN m.body END FROM {LIVE_PART} m "
    "WHERE m.ctid = ANY({places}) AND m.state = 'ready' FOR UPDATE SKIP LOCKED"
)
_LOCK_ROWS_PREPARED = PreparedStatement(
    "outbox_lock_rows",
    ["bigint[]", "tid[]"],
    _LOCK_ROWS.format(unread="$1", places="$2"),
    returns_binary=True,
)
_LOCKERS = (
    # The row's xmax is the transaction that has locked or changed it, unless several transactions have locked it.
    f"SELECT DISTINCT l.pid FROM {LIVE_PART} m JOIN pg_locks l ON l.locktype = 'transactionid' AND l.transactionid = m.xmax "
    "AND l.granted AND l.pid IS NOT NULL WHERE m.id = ANY(%s::bigint[])"
)
_WRITTEN_BY_A_PASS = (LIVE_PART, HISTORY, TrailEntry._meta.db_table, PendingCallback._meta.db_table)
_TABLE_LOCKERS = (
    "SELECT DISTINCT pid FROM pg_locks WHERE locktype = 'relation' AND granted AND pid IS NOT NULL "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    f"AND (relation = ANY(%s::text[]::regclass[]) OR relation IN (SELECT relid FROM pg_partition_tree('{HISTORY}'))) "
    "AND mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')"
)
_SHARD_HOLDERS = (
    # No timeout ends a statement while PostgreSQL waits for its client to read.
    "SELECT pid, shards, seconds, CASE WHEN unread THEN pg_terminate_backend(pid) ELSE false END "
    "FROM (SELECT l.pid, array_agg(l.objid::int ORDER BY l.objid) AS shards, "
    "EXTRACT(EPOCH FROM max(statement_timestamp() - a.xact_start))::int AS seconds, "
    f"bool_and(a.wait_event = 'ClientWrite' AND strpos(a.query, '{_RELAY_COMMENT}') > 0 "
    "AND pg_has_role(a.usesysid, 'USAGE')) AS unread "
    "FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory' AND l.granted "
    f"AND l.database = a.datid AND a.datname = current_database() AND l.classid = {LOCK_SPACE % 2**32} AND l.objsubid = 2 "
    "AND a.xact_start < statement_timestamp() - make_interval(secs => %s) GROUP BY l.pid) AS holders"
)


class BusyShard(NamedTuple):
    """A shard that has ready messages, and the floor above which to read it."""

    shard: int
    above: int


class TopicPause(NamedTuple):
    """A paused topic.

    Attributes:
        in_trial: the positions of its probes, which find out whether the broker takes them; of a limited topic, those of the
            messages that its rate allows.
        is_resuming: its messages are being made ready again, and are sent like all others unless it is limited.
        probe_in: seconds until the next probes, or the next messages of a limited topic; infinite if none are due.
        is_limited: it is being resumed at its rate.
    """

    topic: str
    in_trial: frozenset[int]
    is_resuming: bool
    probe_in: float
    is_limited: bool = False


@dataclass(frozen=True, kw_only=True)
class WorkFound:
    """Ready messages, retries and paused topics, as one query found them.

    Attributes:
        shards: the shards that have ready messages.
        first: by shard, the first position at which a message found there became ready.
        retry_in: seconds until the next retry is due; 0 if one is due now, infinite if no message is retrying.
        retries_since: no message that is retrying was due before this instant, and none will be.
        paused: the paused topics.
    """

    shards: Sequence[BusyShard]
    first: Mapping[int, int]
    retry_in: float
    retries_since: str = EVER
    paused: Sequence[TopicPause] = ()


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The messages that a pass has claimed.

    Attributes:
        rows: in the order to send them in. On PostgreSQL they are locked until the transaction ends, so they can be settled.
        locked_shards: shards that another relay, or another transaction, has locked.
        locked_rows: ready messages that were not claimed, because another session has locked their rows.
        begun_at: when it had locked the shards, by `monotonic`.
    """

    rows: Sequence[RelayedMessage] = ()
    locked_shards: Sequence[int] = ()
    locked_rows: Sequence[RelayedMessage] = ()
    begun_at: float = 0.0


class Bounds(NamedTuple):
    """How a pass's transaction ends.

    Attributes:
        longest: the server ends it when it is idle, or executes one statement, for this long: the relay is frozen or hangs, and
            must not settle anything.
        is_repeatable: its commit need not wait for the disk. If the server crashes, the messages are sent again.
    """

    longest: timedelta
    is_repeatable: bool


NOTHING_SKIPPED: Mapping[int, str] = MappingProxyType({})
BATCH_BYTES = 8 * 1024 * 1024
"""Of the bodies of one batch together. A lane of a relay needs about four times as much memory."""
_UNBOUNDED_BYTES = 2**62


def claims_by_locks(alias: str) -> bool:
    """Do several relays share this database (PostgreSQL), or does one hold a lease on it (SQLite)?"""
    return is_postgresql(connections[alias])


def look(
    alias: str,
    floors: Mapping[int, int] | None = None,
    among: Iterable[int] = range(SHARDS),
    retries_since: str = EVER,
    *,
    from_the_start: bool = False,
) -> WorkFound:
    """Find the shards that have ready messages, the time of the next retry, and the paused topics.

    It reads only, without locks: an idle relay must not take SQLite's write lock, nor open transactions.

    Args:
        floors: by shard, the position above which to read.
        among: the shards to query.
        retries_since: of the last query.
        from_the_start: read from the first row, whatever the floors and `retries_since` are.
    """
    connection = connections[alias]
    floors = floors or {}
    above = {shard: 0 if from_the_start else floors.get(shard, 0) for shard in among}
    since = EVER if from_the_start else retries_since
    if is_usable(connection):
        found = _LOOK_PREPARED.fetch_after(connection, _KEEP_PLANS, [array_of(above), array_of(above.values()), since])
    else:
        values = "VALUES " + ", ".join(map(str, above.items()))
        found = fetch(connection, _look(values, f"'{since}'", live(connection), now(connection)), [])
    of_shards = [row[:5] for row in found if row[0] is not None]
    first = {shard: min(filter(None, positions)) for shard, *positions, _, _ in of_shards if any(positions)}
    shards = [BusyShard(shard, min(floors.get(shard, 0), position - 1)) for shard, position in first.items()]
    *_, retry_in, since = of_shards[0]
    paused = [
        TopicPause(topic, frozenset(json.loads(in_trial)), kind > 0, math.inf if probe_in is None else probe_in, kind > 1)
        for shard, *_, topic, in_trial, kind, probe_in in found
        if shard is None
    ]
    retry_in = math.inf if retry_in is None else retry_in
    return WorkFound(shards=shards, first=first, retry_in=retry_in, retries_since=since or EVER, paused=paused)


def writers(alias: str) -> frozenset[str]:
    """The virtual ids of the other open transactions that have drawn a position.

    PostgreSQL's nextval() locks the sequence before it draws a number. The lock is released when the transaction's rows have
    become visible.
    """
    connection = connections[alias]
    if not is_postgresql(connection):
        return frozenset()
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT DISTINCT virtualtransaction FROM pg_locks WHERE locktype = 'relation' "
            # If the column does not own its sequence, the sequence cannot be found, and every writing transaction counts.
            "AND COALESCE(relation = pg_get_serial_sequence(%s, 'id')::regclass, true) "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
            "AND mode = 'RowExclusiveLock' AND granted AND pid IS DISTINCT FROM pg_backend_pid()",
            [TABLE],
        )
        return frozenset(virtual_id for (virtual_id,) in cursor.fetchall())


def require_writable(alias: str) -> None:
    """Execute an UPDATE of no rows, which a standby and a read-only database refuse. A round without work only reads.

    Raises:
        django.db.Error: the database is not writable now.
    """
    execute(connections[alias], f"UPDATE {live(connections[alias])} SET state = state WHERE false")


def claim_ready(
    alias: str,
    shards: Sequence[BusyShard],
    limit: int,
    skipped: Mapping[int, str] = NOTHING_SKIPPED,
    limits: Bounds | None = None,
) -> Claim:
    """Lock those of the `shards` that are free until the open transaction ends, and lock their ready messages.

    It is more than one statement on purpose: a snapshot from before the locks could still contain rows that the previous holder
    of a shard has published since. The messages are in the order to send them in: by priority, then by position.

    Their bodies have at most `BATCH_BYTES` together; a larger one is claimed alone. Large bodies are read by the statement that
    locks their rows, when it is known how many of them are claimed.

    Args:
        skipped: positions not to read, with their keys. No message of these keys is read.
        limits: of the transaction, which has not executed a statement yet.

    Raises:
        django.db.OperationalError: a lock timeout, if another session has locked one of the tables.
    """
    connection = connections[alias]
    free_shards = _lock(connection, shards, limits)
    begun_at = monotonic()
    locked_shards = [one.shard for one in shards if one not in free_shards]
    if not free_shards:
        return Claim(locked_shards=locked_shards, begun_at=begun_at)
    each = -(-limit // len(free_shards))
    rows = _read(connection, free_shards, each, skipped)
    counted = Counter(row.shard for row in rows)
    if 2 * len(rows) < limit and (cut := [one for one in free_shards if counted[one.shard] >= each]):
        # A few shards have the backlog, for example of one hot key: they get what the others leave of the limit.
        others = [row for row in rows if counted[row.shard] < each]
        rows = others + _read(connection, cut, (limit - len(others)) // len(cut), skipped)
    rows = _within_bytes(sorted(rows, key=lambda row: (-row.priority, row.position))[:limit])
    free = _lock_rows(connection, rows)
    locked_rows = [row for row in rows if row.position not in free]
    if locked_rows:
        rows = in_order(rows, free)
    rows = [row if (body := free[row.position]) is None else row._replace(body=body, unread_bytes=None) for row in rows]
    return Claim(rows=rows, locked_shards=locked_shards, locked_rows=locked_rows, begun_at=begun_at)


def _within_bytes(rows: list[RelayedMessage]) -> list[RelayedMessage]:
    """The first rows whose bodies have at most `BATCH_BYTES` together; at least one row."""
    total = 0
    for index, row in enumerate(rows):
        total += row.unread_bytes or len(row.body)
        if total > BATCH_BYTES and index:
            return rows[:index]
    return rows


def read_published(alias: str, positions: Sequence[int]) -> list[RelayedMessage]:
    """The published messages at these positions, in the order of publishing. They are not locked."""
    connection = connections[alias]
    on_postgresql = is_postgresql(connection)
    expires_in = (_EXPIRES_IN_SECONDS if on_postgresql else _EXPIRES_IN_SECONDS_SQLITE).format(now=now(connection))
    select = _select(live(connection), expires_in, _UNBOUNDED_BYTES)
    found = _fetch_published(connection, f"{_RELAY_COMMENT}{select}", positions)
    return list(map(RelayedMessage._make, map(_with_bytes if on_postgresql else _from_sqlite, found)))


def parts_of_published(alias: str, positions: Sequence[int]) -> list[list[int]]:
    """The positions in parts whose bodies have at most `BATCH_BYTES` together, or of one message."""
    sizes = dict(_fetch_published(connections[alias], "SELECT m.id, length(m.body)", positions))
    parts: list[list[int]] = []
    total = BATCH_BYTES
    for position in positions:
        total += (size := sizes.get(position, 0))
        if total > BATCH_BYTES or not parts:
            parts.append([])
            total = size
        parts[-1].append(position)
    return parts


def _fetch_published(connection: BaseDatabaseWrapper, select: str, positions: Sequence[int]) -> list[Any]:
    condition, among = any_of(connection, positions)
    with connection.cursor() as cursor:
        # The range is for the BRIN index of history.
        cursor.execute(
            f"{select} FROM {HISTORY if is_postgresql(connection) else TABLE} m WHERE m.state = 'published' "
            f"AND m.day >= {FIRST_DAY} AND m.id BETWEEN %s AND %s AND m.id {condition} ORDER BY m.id",
            [min(positions), max(positions), among],
        )
        return list(cursor.fetchall())


def _lock(connection: BaseDatabaseWrapper, shards: Sequence[BusyShard], limits: Bounds | None) -> list[BusyShard]:
    if not is_postgresql(connection):
        # The write lock of the open transaction, or the lease, covers every shard.
        return list(shards)
    query = (
        f"SELECT shard FROM unnest('{array_of(one.shard for one in shards)}'::int[]) AS s(shard) "
        f"WHERE pg_try_advisory_xact_lock({LOCK_SPACE}, shard)"
    )
    script = _begin(connection, limits) if limits else ""
    if is_usable(connection):
        found = execute_script(connection, f"{script}{query}")
    else:
        with connection.cursor() as cursor:
            if script:
                cursor.execute(script)
            cursor.execute(query)
            found = cursor.fetchall()
    locked = {shard for (shard,) in found}
    return [one for one in shards if one.shard in locked]


def _begin(connection: BaseDatabaseWrapper, limits: Bounds) -> str:
    """A pass's first statements.

    They set the isolation level: with REPEATABLE READ the statements of the claim would share a snapshot. They take the table
    locks that settling takes: messages that cannot be settled, for example while an index is created, must not be sent. And
    they keep plans.
    """
    for_a_lock = min(int(limits.longest.total_seconds() * 1000), _LONGEST_WAIT_FOR_A_LOCK)
    then = (
        f"SET LOCAL lock_timeout = {for_a_lock}; {_KEEP_PLANS}; "
        f"{DO_NOT_WAIT_FOR_THE_DISK if limits.is_repeatable else ''}; "
        f"LOCK TABLE {', '.join(_WRITTEN_BY_A_PASS)} IN ROW EXCLUSIVE MODE; "
    )
    return bounds(connection, limits.longest, first=READ_COMMITTED, then=then)


def _lock_rows(connection: BaseDatabaseWrapper, rows: Sequence[RelayedMessage]) -> Mapping[int, bytes | None]:
    """Lock the rows that have not changed since they were read, and skip those that another session has locked.

    `publish_now()`, for example, may have committed in between, and what was read of its row is outdated.

    Returns:
        The locked positions, each with its body if that has not been read.

    Raises:
        django.db.Error: the server is a standby or read-only (25006). So no message is sent that could not be settled.
    """
    positions = [row.position for row in rows]
    unread = [row.position for row in rows if row.unread_bytes]
    if not is_postgresql(connection):
        condition, among = any_of(connection, unread)
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT id, body FROM {TABLE} WHERE id {condition}", [among])
            return dict.fromkeys(positions) | {position: _bytes(body) for position, body in cursor.fetchall()}
    if not positions:
        return {}
    # A row that has changed is elsewhere, so it need not be searched for; another one may be in its place.
    given = [array_of(unread), places(row.place for row in rows)]
    if is_usable(connection):
        found = _LOCK_ROWS_PREPARED.fetch(connection, given)
    else:
        found = list(map(_with_bytes, fetch(connection, _LOCK_ROWS.format(unread="%s::bigint[]", places="%s::tid[]"), given)))
    versions = {row.position: row.version for row in rows}
    return {position: body for position, version, body in found if version == versions.get(position)}


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


def lockers(alias: str, positions: Sequence[int]) -> list[int]:
    """The pids of the sessions that have locked these rows, as far as PostgreSQL reports them."""
    return sorted(pid for (pid,) in fetch(connections[alias], _LOCKERS, [array_of(positions)]))


def table_lockers(alias: str) -> list[int]:
    """The pids of the sessions whose table locks conflict with the writes of a pass."""
    return sorted(pid for (pid,) in fetch(connections[alias], _TABLE_LOCKERS, [list(_WRITTEN_BY_A_PASS)]))


class ShardHolder(NamedTuple):
    """A transaction that has held locks on shards for longer than a pass of a relay may last.

    Attributes:
        pid: of its session.
        seconds: its age.
        is_ended: it was a relay's, which did not read its messages, so its session was ended.
    """

    pid: int
    shards: Sequence[int]
    seconds: int
    is_ended: bool


def shard_holders(alias: str, longer_than: timedelta) -> list[ShardHolder]:
    """The transactions that hold locks on shards and are older than this. Relays that do not read their messages are ended."""
    return list(map(ShardHolder._make, fetch(connections[alias], _SHARD_HOLDERS, [longer_than.total_seconds()])))


def _read(
    connection: BaseDatabaseWrapper, shards: Sequence[BusyShard], each: int, skipped: Mapping[int, str]
) -> list[RelayedMessage]:
    """Up to `each` messages of each shard from each of the two indexes; without the bodies that may be too many bytes."""
    found: list[Any] = []
    excluded: list[Any] = []
    small = BATCH_BYTES // (2 * each * len(shards))
    if is_postgresql(connection):
        given: list[Any] = [array_of(one.shard for one in shards), array_of(one.above for one in shards), each, small]
        if is_usable(connection) and not skipped:
            found = _READ_PREPARED.fetch(connection, given)
        else:
            excluded = [array_of(skipped), [key for key in skipped.values() if key]] if skipped else []
            with connection.cursor() as cursor:
                statement = _of_shards("%s", "%s", "%s", small, _NOT_SKIPPED if skipped else "")
                cursor.execute(statement, [*given[:2], *excluded, each, *excluded, each])
                found += map(_with_bytes, cursor.fetchall())
    else:
        # No other transaction writes meanwhile, so several statements see the same rows.
        expires_in = _EXPIRES_IN_SECONDS_SQLITE.format(now=now(connection))
        not_skipped = _NOT_SKIPPED_SQLITE if skipped else ""
        excluded = [json.dumps(list(skipped)), json.dumps([key for key in skipped.values() if key])] if skipped else []
        parts = chain.from_iterable(_of_a_shard(TABLE, expires_in, *one, "%s", small, not_skipped) for one in shards)
        with connection.cursor() as cursor:
            for part in parts:
                cursor.execute(part, [*excluded, each])
                found += map(_from_sqlite, cursor.fetchall())
    return _without_overtakers(list(map(RelayedMessage._make, found)), each)


def _without_overtakers(rows: list[RelayedMessage], each: int) -> list[RelayedMessage]:
    """Leave out messages whose key may have an earlier message in the unread part of the other index."""
    if not any(row.ready_position for row in rows):
        return rows
    last_read = {(row.shard, row.ready_position > 0): row for row in rows}
    cut_at: dict[int, int] = {}
    for part, count in Counter((row.shard, row.ready_position > 0) for row in rows).items():
        if count >= each:
            last = last_read[part]
            # A prioritised message has no key, and is read before all messages that have one.
            position = 0 if last.priority else last.position
            cut_at[last.shard] = min(cut_at.get(last.shard, position), position)
    return [row for row in rows if not row.key or row.position <= cut_at.get(row.shard, row.position)]


def _with_bytes(row: Sequence[Any]) -> tuple[Any, ...]:
    """psycopg 2 returns a memoryview."""
    return tuple(bytes(value) if isinstance(value, memoryview) else value for value in row)


def _from_sqlite(row: Sequence[Any]) -> Sequence[Any]:
    """Convert the values to the types of the columns. SQLite stores a value of any type that was written by hand."""
    values = dict(zip(RelayedMessage._fields, row, strict=True))
    values.update(id=_uuid_text(values["id"]), body=_bytes(values["body"]))
    values["is_blocked"] = bool(values["is_blocked"])
    values.update({name: values[name] if type(values[name]) is int else 0 for name in ("priority", "attempts")})
    values.update({name: str(values[name]) for name in _NAMES})
    return list(values.values())


def _uuid_text(value: str) -> str:
    try:
        return str(uuid.UUID(value))
    except ValueError:
        return value


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _instant(column: str, text: str) -> datetime:
    try:
        instant = datetime.fromisoformat(text)
        if instant.tzinfo is None:
            return instant.replace(tzinfo=UTC)
        # Converted to UTC here, so that instants of the first and last day of the calendar overflow here.
        return instant if instant.tzinfo is UTC else instant.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise DamagedRow(f"{column} is {text[:_SHOWN]!r}, which is not an instant of the years 1 to 9999") from error
