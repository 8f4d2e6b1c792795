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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain, zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from exactly_once.process.clock import monotonic
from exactly_once.sql.connections import READ_COMMITTED, execute, fetch, is_postgresql
from exactly_once.sql.now import NOW
from exactly_once.sql.prepared_statements import KEEP_PLANS, PreparedStatement, execute_script, is_usable
from outbox.models import SHARDS, PendingCallback, TrailEntry, UniqueMessage
from outbox.store import messages
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
from outbox.store.messages import (
    RELAY_COMMENT,
    VERSION,
    RelayedMessage,
    as_bytes,
    fetch_messages,
    in_order,
    select,
)

STREAM = "m.state = 'ready' AND m.ready_position = 0"
SECONDARY = "m.state = 'ready' AND m.ready_position > 0"
_LONGEST_WAIT_FOR_A_LOCK = 1000
"""In milliseconds. A pass skips the shards and rows that another session has locked; it waits for locks of tables."""
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
    f"UNION ALL SELECT NULL, NULL, NULL, NULL, NULL, p.topic, CAST(p.in_trial AS text), p.mode, {{probe_in}} "
    f"FROM {PAUSED_TOPICS} p"
)
_UNTIL = "CAST(EXTRACT(EPOCH FROM {instant} - {now}) AS float8)"
_UNTIL_SQLITE = "(julianday({instant}) - julianday({now})) * 86400"


def _look(shards: str, retries_since: str, vendor: str) -> str:
    on_postgresql, at = vendor == "postgresql", NOW[vendor]
    until = _UNTIL if on_postgresql else _UNTIL_SQLITE
    retry_in, probe_in = (until.format(instant=instant, now=at) for instant in ("m.available_at", "p.probe_at"))
    # Two seconds are more than a pass takes from storing a failure to its commit.
    recently = f"{at} - interval '2 seconds'" if on_postgresql else "''"
    return _LOOK.format(
        shards=shards,
        live=LIVE_PART if on_postgresql else TABLE,
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


def _of_a_shard(vendor: str, shard: object, above: object, each: str, small: object, not_skipped: str = "") -> list[str]:
    """Queries for up to `each` ready messages of a shard `above` its floor: in the secondary index, and in its stream.

    Bodies of more than `small` bytes are not read.
    """
    on_postgresql = vendor == "postgresql"
    is_shard = _equals(shard, indexed=on_postgresql)
    drawn_above = above if on_postgresql else 0
    parts = (part.format(is_shard=is_shard, above=above, drawn_above=drawn_above) for part in (_IN_SECONDARY, _IN_STREAM))
    ready = f"{select(vendor, small)} FROM {LIVE_PART if on_postgresql else TABLE} m WHERE true{not_skipped}"
    return [f"{ready} AND {part} LIMIT {each}" for part in parts]


def _of_shards(shards: str, floors: str, each: str, small: object, not_skipped: str = "") -> str:
    """The same for several shards in one statement, so that a row that moves from one index to the other is seen in one."""
    of_a_shard = _of_a_shard("postgresql", "s.shard", "s.above", each, small, not_skipped)
    parts = " UNION ALL ".join(f"({part})" for part in of_a_shard)
    each_shard = f"unnest({shards}::int[], {floors}::bigint[]) AS s(shard, above)"
    return f"{RELAY_COMMENT}SELECT m.* FROM {each_shard} CROSS JOIN LATERAL ({parts}) m"


_LOOK_PREPARED = PreparedStatement(
    "outbox_look",
    ["int[]", "bigint[]", "timestamptz"],
    _look("SELECT * FROM unnest($1, $2)", "$3", "postgresql"),
)
_KEEP_PLANS = f"SELECT {KEEP_PLANS}"
_READ_PREPARED = PreparedStatement(
    "outbox_read",
    ["int[]", "bigint[]", "bigint", "bigint"],
    _of_shards("$1", "$2", "$3", "$4"),
    returns_binary=True,
)
_LOCK_ROWS = (
    f"{RELAY_COMMENT}SELECT m.id, {VERSION}, CASE WHEN m.id = ANY({{unread}}) THEN m.body END FROM {LIVE_PART} m "
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
_WRITTEN_BY_A_PASS = (LIVE_PART, HISTORY, *(model._meta.db_table for model in (TrailEntry, PendingCallback, UniqueMessage)))
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
    f"bool_and(a.wait_event = 'ClientWrite' AND strpos(a.query, '{RELAY_COMMENT}') > 0 "
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
        mode: why its messages are `paused`; those of a resuming one are sent like all others.
        in_trial: the positions of its probes, which find out whether the broker takes them; of a limited topic, those of the
            messages that its rate allows.
        probe_in: seconds until the next probes, or the next messages of a limited topic; infinite if none are due.
    """

    topic: str
    mode: str
    in_trial: frozenset[int]
    probe_in: float


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
        found = fetch(connection, _look(values, f"'{since}'", connection.vendor), [])
    of_shards = [row[:5] for row in found if row[0] is not None]
    first = {shard: min(filter(None, positions)) for shard, *positions, _, _ in of_shards if any(positions)}
    shards = [BusyShard(shard, min(floors.get(shard, 0), position - 1)) for shard, position in first.items()]
    *_, retry_in, since = of_shards[0]
    paused = [
        TopicPause(topic, mode, frozenset(json.loads(in_trial)), math.inf if probe_in is None else probe_in)
        for shard, *_, topic, in_trial, mode, probe_in in found
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
    rows = _fair_part(sorted(rows, key=lambda row: (-row.priority, row.position)), limit)
    free = _lock_rows(connection, rows)
    locked_rows = [row for row in rows if row.position not in free]
    if locked_rows:
        rows = in_order(rows, free)
    rows = [row if (body := free[row.position]) is None else row._replace(body=body, unread_bytes=None) for row in rows]
    return Claim(rows=rows, locked_shards=locked_shards, locked_rows=locked_rows, begun_at=begun_at)


def _fair_part(rows: list[RelayedMessage], limit: int) -> list[RelayedMessage]:
    """At most `limit` rows, and half of them from each index while both have as many: neither waits for the other's backlog.

    Args:
        rows: in the order to send them in. The first is always among those returned.
    """
    secondary = [row for row in rows if row.ready_position]
    if not secondary:
        return _within_bytes(rows[:limit])
    stream = [row for row in rows if not row.ready_position]
    in_turns = zip_longest(secondary, stream) if rows[0].ready_position else zip_longest(stream, secondary)
    chosen = [row for row in chain.from_iterable(in_turns) if row is not None][:limit]
    return in_order(rows, {row.position for row in _within_bytes(chosen)})


def _within_bytes(rows: list[RelayedMessage]) -> list[RelayedMessage]:
    """The first rows whose bodies have at most `BATCH_BYTES` together; at least one row."""
    total = 0
    for index, row in enumerate(rows):
        total += row.unread_bytes or len(row.body)
        if total > messages.BATCH_BYTES and index:
            return rows[:index]
    return rows


def _lock(connection: BaseDatabaseWrapper, shards: Sequence[BusyShard], limits: Bounds | None) -> list[BusyShard]:
    if not is_postgresql(connection):
        # The write lock of the open transaction covers every shard.
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
    script = bounds(connection, limits.longest)
    return script and (
        f"{READ_COMMITTED}{script}SET LOCAL lock_timeout = {for_a_lock}; {_KEEP_PLANS}; "
        f"{DO_NOT_WAIT_FOR_THE_DISK if limits.is_repeatable else ''}; "
        f"LOCK TABLE {', '.join(_WRITTEN_BY_A_PASS)} IN ROW EXCLUSIVE MODE; "
    )


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
        read = fetch(connection, f"SELECT id, body FROM {TABLE} WHERE id {condition}", [among])
        return dict.fromkeys(positions) | {position: as_bytes(body) for position, body in read}
    if not positions:
        return {}
    # A row that has changed is elsewhere, so it need not be searched for; another one may be in its place.
    given = [array_of(unread), places(row.place for row in rows)]
    if is_usable(connection):
        found = _LOCK_ROWS_PREPARED.fetch(connection, given)
    else:
        found = fetch(connection, _LOCK_ROWS.format(unread="%s::bigint[]", places="%s::tid[]"), given)
    versions = {row.position: row.version for row in rows}
    return {position: body and bytes(body) for position, version, body in found if version == versions.get(position)}


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
    small = messages.BATCH_BYTES // (2 * each * len(shards))
    places_to_read = [array_of(one.shard for one in shards), array_of(one.above for one in shards)]
    if is_usable(connection) and not skipped:
        found = _READ_PREPARED.fetch(connection, [*places_to_read, each, small])
        return _without_overtakers(list(map(RelayedMessage._make, found)), each, partial(_first_unread, connection))
    not_skipped, excluded = _not_skipped(connection, skipped)
    if is_postgresql(connection):
        statement = _of_shards("%s", "%s", "%s", small, not_skipped)
        rows = fetch_messages(connection, statement, [*places_to_read, *excluded, each, *excluded, each])
    else:
        # No other transaction writes meanwhile, so several statements see the same rows.
        parts = chain.from_iterable(_of_a_shard(connection.vendor, *one, "%s", small, not_skipped) for one in shards)
        rows = [row for part in parts for row in fetch_messages(connection, part, [*excluded, each])]
    return _without_overtakers(rows, each, partial(_first_unread, connection))


def _not_skipped(connection: BaseDatabaseWrapper, skipped: Mapping[int, str]) -> tuple[str, list[Any]]:
    if not skipped:
        return "", []
    keys = [key for key in skipped.values() if key]
    if is_postgresql(connection):
        return " AND m.id <> ALL(%s::bigint[]) AND m.key <> ALL(%s::text[])", [array_of(skipped), keys]
    among = "IN (SELECT value FROM json_each(%s))"
    return f" AND m.id NOT {among} AND m.key NOT {among}", [json.dumps(list(skipped)), json.dumps(keys)]


def _without_overtakers(
    rows: list[RelayedMessage], each: int, first_unread: Callable[[Mapping[str, int]], Mapping[str, int]]
) -> list[RelayedMessage]:
    """Leave out messages whose key has an earlier message in the unread part of the other index.

    If that is the secondary ready index, it is asked for their keys: a burst of due messages delays only those that follow it.

    Args:
        first_unread: `_first_unread` of the connection.
    """
    if not any(row.ready_position for row in rows):
        return rows
    counted = Counter((row.shard, row.ready_position > 0) for row in rows)
    last_read = {(row.shard, row.ready_position > 0): row for row in rows}
    # A prioritised message has no key, and is read before all messages that have one.
    cut_at = {part: 0 if last.priority else last.position for part, last in last_read.items() if counted[part] >= each}
    unread = {row.key: cut_at[row.shard, True] for row in rows if not row.ready_position and (row.shard, True) in cut_at}
    unread.pop("", None)
    first = first_unread(unread) if unread else {}

    def is_overtaker(row: RelayedMessage) -> bool:
        other = cut_at.get((row.shard, False), row.position) if row.ready_position else first.get(row.key, row.position)
        return row.key != "" and row.position > other

    return [row for row in rows if not is_overtaker(row)]


def _first_unread(connection: BaseDatabaseWrapper, keys: Mapping[str, int]) -> Mapping[str, int]:
    """By key, its first message in the secondary ready index above the given position, for those that have one."""
    first = f"SELECT m.id FROM {live(connection)} m WHERE {SECONDARY} AND m.key <> '' AND m.key = {{}} AND m.id > {{}} "
    first += "ORDER BY m.key, m.id LIMIT 1"
    if is_postgresql(connection):
        asked = "unnest(%s::text[], %s::bigint[]) AS asked(key, above)"
        query = f"SELECT asked.key, m.id FROM {asked} CROSS JOIN LATERAL ({first.format('asked.key', 'asked.above')}) m"
        return dict(fetch(connection, query, [list(keys), array_of(keys.values())]))
    found = {key: fetch(connection, first.format("%s", "%s"), [key, above]) for key, above in keys.items()}
    return {key: rows[0][0] for key, rows in found.items() if rows}
