"""Reading the ready messages of the shards that a pass has locked, from the two indexes that have them."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from django.db.backends.base.base import BaseDatabaseWrapper

from exactly_once.sql.connections import fetch, is_postgresql
from exactly_once.sql.prepared_statements import PreparedStatement, is_usable
from outbox.store import messages
from outbox.store.dialect import LIVE_TABLE, array_of, live
from outbox.store.looking import BusyShard
from outbox.store.messages import RELAY_COMMENT, RelayedMessage, fetch_messages, select
from outbox.store.ready_index import SECONDARY, in_secondary, in_stream


def _of_a_shard(vendor: str, shard: str, floor: str, each: str, small: object, unless: str) -> list[str]:
    """Queries for up to `each` ready messages of a shard above its floor: in the secondary index, and in its stream."""
    ready = f"{select(vendor, small)} FROM {LIVE_TABLE[vendor]} m WHERE {unless} AND"
    in_order = in_secondary(vendor, shard, floor, "m.priority DESC, m.id"), in_stream(vendor, shard, floor)
    return [f"{ready} {part} LIMIT {each}" for part in in_order]


def _of_shards() -> str:
    """All of them in one statement, so that a row that moves from one index to the other is seen in one."""
    # Many rows may be skipped, and a parameter's array is compared element by element; a subquery is hashed. The planner
    # believes that IS NOT NULL is true of nearly every row. Of NOT IN it believes that of half of them, and then sorts a shard.
    skipped = "m.id IN (SELECT unnest($5)) OR m.key IN (SELECT jsonb_array_elements_text($6))"
    unless = f"CASE WHEN {skipped} THEN NULL ELSE 1 END IS NOT NULL"
    of_a_shard = " UNION ALL ".join(f"({part})" for part in _of_a_shard("postgresql", "s.shard", "s.above", "$3", "$4", unless))
    return f"{RELAY_COMMENT}SELECT m.* FROM unnest($1, $2) AS s(shard, above) CROSS JOIN LATERAL ({of_a_shard}) m"


_READ = PreparedStatement(
    "outbox_read",
    ["int[]", "bigint[]", "bigint", "bigint", "bigint[]", "jsonb"],
    _of_shards(),
    returns_binary=True,
)


def read_ready(
    connection: BaseDatabaseWrapper, shards: Sequence[BusyShard], each: int, skipped: Mapping[int, str]
) -> list[RelayedMessage]:
    """Up to `each` messages of each shard from each of the two indexes; without the bodies that may be too many bytes.

    Args:
        skipped: positions not to read, with their keys. No message of these keys is read.
    """
    small = messages.BATCH_BYTES // (2 * each * len(shards))
    keys = json.dumps([key for key in skipped.values() if key])
    if is_postgresql(connection):
        shards_to_read = array_of(one.shard for one in shards), array_of(one.above for one in shards)
        given = [*shards_to_read, each, small, array_of(skipped), keys]
        if is_usable(connection):
            rows = list(map(RelayedMessage._make, _READ.fetch(connection, given)))
        else:
            rows = fetch_messages(connection, *_READ.as_text(given))
    else:
        # No other transaction writes meanwhile, so several statements see the same rows.
        among = "IN (SELECT value FROM json_each(%s))"
        unless, given = f"m.id NOT {among} AND m.key NOT {among}", [json.dumps([*skipped]), keys, each]
        of_shards = (_of_a_shard("sqlite", str(one.shard), str(one.above), "%s", small, unless) for one in shards)
        rows = [row for parts in of_shards for part in parts for row in fetch_messages(connection, part, given)]
    return _without_overtakers(rows, each, partial(_first_unread, connection))


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
