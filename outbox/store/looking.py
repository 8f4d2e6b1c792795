"""Looking for work, without locks: the shards that have ready messages, the next retry, the paused topics, and the writers."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from django.db import connections

from exactly_once.sql.connections import execute, fetch, is_postgresql
from exactly_once.sql.now import NOW
from exactly_once.sql.prepared_statements import KEEP_PLANS, PreparedStatement, is_usable
from outbox.models import SHARDS
from outbox.store.dialect import EVER, LIVE_TABLE, PAUSED_TOPICS, TABLE, array_of, live, seconds_until
from outbox.store.ready_index import in_secondary, in_stream


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
        found = _LOOK.fetch_after(connection, f"SELECT {KEEP_PLANS}", [array_of(above), array_of(above.values()), since])
    else:
        values = "VALUES " + ", ".join(map(str, above.items()))
        found = fetch(connection, _query(connection.vendor, values, f"'{since}'"), [])
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


def _query(vendor: str, shards: str, since: str) -> str:
    table = LIVE_TABLE[vendor]
    # Two seconds are more than a pass takes from storing a failure to its commit.
    recently = f"{NOW[vendor]} - interval '2 seconds'"
    oldest, not_before = f"LEAST(m.available_at, {recently})", f"AND m.available_at >= {since}"
    if vendor == "sqlite":  # it has no dead rows to skip
        recently, oldest, not_before = "''", "''", ""
    return (
        f"WITH shards(shard, floor) AS ({shards}), retry(seconds, since) AS (SELECT "
        f"CASE WHEN m.available_at <= {NOW[vendor]} THEN 0 ELSE {seconds_until(vendor, 'm.available_at')} END, "
        f"{oldest} FROM {table} m WHERE m.state = 'retrying' {not_before} "
        "ORDER BY m.available_at, m.id LIMIT 1) SELECT shard, "
        f"(SELECT m.id FROM {table} m WHERE {in_stream(vendor, 'shards.shard', 'shards.floor')} LIMIT 1), "
        f"(SELECT m.ready_position FROM {table} m "
        f"WHERE {in_secondary(vendor, 'shards.shard', 'shards.floor', 'm.ready_position')} LIMIT 1), "
        f"(SELECT seconds FROM retry), CAST(COALESCE((SELECT since FROM retry), {recently}) AS text), NULL, NULL, NULL, NULL "
        "FROM shards "
        # The paused topics are read by the same statement, which saves a round trip.
        "UNION ALL SELECT NULL, NULL, NULL, NULL, NULL, p.topic, CAST(p.in_trial AS text), p.mode, "
        f"{seconds_until(vendor, 'p.probe_at')} FROM {PAUSED_TOPICS} p"
    )


_LOOK = PreparedStatement(
    "outbox_look",
    ["int[]", "bigint[]", "timestamptz"],
    _query("postgresql", "SELECT * FROM unnest($1, $2)", "$3"),
)


def writers(alias: str) -> frozenset[str]:
    """The virtual ids of the other open transactions that have drawn a position.

    PostgreSQL's nextval() locks the sequence before it draws a number. The lock is released when the transaction's rows have
    become visible.
    """
    connection = connections[alias]
    if not is_postgresql(connection):
        return frozenset()
    found = fetch(
        connection,
        "SELECT DISTINCT virtualtransaction FROM pg_locks WHERE locktype = 'relation' "
        # If the column does not own its sequence, the sequence cannot be found, and every writing transaction counts.
        "AND COALESCE(relation = pg_get_serial_sequence(%s, 'id')::regclass, true) "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
        "AND mode = 'RowExclusiveLock' AND granted AND pid IS DISTINCT FROM pg_backend_pid()",
        [TABLE],
    )
    return frozenset(virtual_id for (virtual_id,) in found)


def require_writable(alias: str) -> None:
    """Execute an UPDATE of no rows, which a standby and a read-only database refuse. A round without work only reads.

    Raises:
        django.db.Error: the database is not writable now.
    """
    execute(connections[alias], f"UPDATE {live(connections[alias])} SET state = state WHERE false")
