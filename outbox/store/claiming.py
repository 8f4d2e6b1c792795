"""The claim of a pass: it locks free shards and their ready messages, and puts these into the order to send them in."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, zip_longest
from typing import NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from exactly_once.process.clock import monotonic
from exactly_once.sql.connections import READ_COMMITTED, fetch, is_postgresql
from exactly_once.sql.prepared_statements import KEEP_PLANS, PreparedStatement, execute_script, is_usable
from outbox.models import PendingCallback, TrailEntry, UniqueMessage
from outbox.store import messages
from outbox.store.dialect import (
    DO_NOT_WAIT_FOR_THE_DISK,
    HISTORY,
    LIVE_PART,
    LOCK_SPACE,
    TABLE,
    any_of,
    array_of,
    array_of_places,
    bounds,
)
from outbox.store.looking import BusyShard
from outbox.store.messages import RELAY_COMMENT, VERSION, RelayedMessage, as_bytes, in_order
from outbox.store.reading import read_ready

WRITTEN_BY_A_PASS = (LIVE_PART, HISTORY, *(model._meta.db_table for model in (TrailEntry, PendingCallback, UniqueMessage)))
_LONGEST_WAIT_FOR_A_LOCK = 1000
"""In milliseconds. A pass skips the shards and rows that another session has locked; it waits for locks of tables."""
_LOCK_ROWS = PreparedStatement(
    "outbox_lock_rows",
    ["bigint[]", "tid[]"],
    f"{RELAY_COMMENT}SELECT m.id, {VERSION}, CASE WHEN m.id = ANY($1) THEN m.body END FROM {LIVE_PART} m "
    "WHERE m.ctid = ANY($2) AND m.state = 'ready' FOR UPDATE SKIP LOCKED",
    returns_binary=True,
)


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


def claim_ready(
    alias: str,
    shards: Sequence[BusyShard],
    limit: int,
    skipped: Mapping[int, str] | None = None,
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
    rows = read_ready(connection, free_shards, each, skipped or {})
    counted = Counter(row.shard for row in rows)
    if 2 * len(rows) < limit and (cut := [one for one in free_shards if counted[one.shard] >= each]):
        # A few shards have the backlog, for example of one hot key: they get what the others leave of the limit.
        others = [row for row in rows if counted[row.shard] < each]
        rows = others + read_ready(connection, cut, (limit - len(others)) // len(cut), skipped or {})
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
    script = bounds(connection, limits.longest)
    return script and (
        f"{READ_COMMITTED}{script}SET LOCAL lock_timeout = {_LONGEST_WAIT_FOR_A_LOCK}; SELECT {KEEP_PLANS}; "
        f"{DO_NOT_WAIT_FOR_THE_DISK if limits.is_repeatable else ''}; "
        f"LOCK TABLE {', '.join(WRITTEN_BY_A_PASS)} IN ROW EXCLUSIVE MODE; "
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
    given = [array_of(unread), array_of_places(row.place for row in rows)]
    found = _LOCK_ROWS.fetch(connection, given) if is_usable(connection) else fetch(connection, *_LOCK_ROWS.as_text(given))
    versions = {row.position: row.version for row in rows}
    return {position: body and bytes(body) for position, version, body in found if version == versions.get(position)}
