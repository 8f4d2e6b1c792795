"""The sessions that stop a pass: those that have locked rows, tables or shards that it needs. On PostgreSQL."""

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from django.db import connections

from exactly_once.sql.connections import fetch
from outbox.store.claiming import WRITTEN_BY_A_PASS
from outbox.store.dialect import HISTORY, LIVE_PART, LOCK_SPACE, array_of
from outbox.store.messages import RELAY_COMMENT


def row_lockers(alias: str, positions: Sequence[int]) -> list[int]:
    """The pids of the sessions that have locked these rows, as far as PostgreSQL reports them."""
    found = fetch(
        connections[alias],
        # The row's xmax is the transaction that has locked or changed it, unless several transactions have locked it.
        f"SELECT DISTINCT l.pid FROM {LIVE_PART} m JOIN pg_locks l ON l.locktype = 'transactionid' "
        "AND l.transactionid = m.xmax AND l.granted AND l.pid IS NOT NULL WHERE m.id = ANY(%s::bigint[]) ORDER BY l.pid",
        [array_of(positions)],
    )
    return [pid for (pid,) in found]


def table_lockers(alias: str) -> list[int]:
    """The pids of the sessions whose table locks conflict with the writes of a pass."""
    found = fetch(
        connections[alias],
        "SELECT DISTINCT pid FROM pg_locks WHERE locktype = 'relation' AND granted AND pid IS NOT NULL "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
        f"AND (relation = ANY(%s::text[]::regclass[]) OR relation IN (SELECT relid FROM pg_partition_tree('{HISTORY}'))) "
        "AND mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock') ORDER BY pid",
        [list(WRITTEN_BY_A_PASS)],
    )
    return [pid for (pid,) in found]


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
    found = fetch(
        connections[alias],
        # No timeout ends a statement while PostgreSQL waits for its client to read.
        "SELECT pid, shards, seconds, CASE WHEN unread THEN pg_terminate_backend(pid) ELSE false END "
        "FROM (SELECT l.pid, array_agg(l.objid::int ORDER BY l.objid) AS shards, "
        "EXTRACT(EPOCH FROM max(statement_timestamp() - a.xact_start))::int AS seconds, "
        f"bool_and(a.wait_event = 'ClientWrite' AND strpos(a.query, '{RELAY_COMMENT}') > 0 "
        "AND pg_has_role(a.usesysid, 'USAGE')) AS unread "
        "FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory' AND l.granted "
        f"AND l.database = a.datid AND a.datname = current_database() AND l.classid = {LOCK_SPACE % 2**32} AND l.objsubid = 2 "
        "AND a.xact_start < statement_timestamp() - make_interval(secs => %s) GROUP BY l.pid) AS holders",
        [longer_than.total_seconds()],
    )
    return list(map(ShardHolder._make, found))
