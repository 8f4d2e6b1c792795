"""The order of a key: its head, and the promotion of the next row when the head is settled.

A row with `ordered` has a place in the order of its handler and key: its id, or, if it replaces another row, that row's place.
The first open row is the *head*. Only the head is due; the others are `waiting`. The transaction that settles the head promotes
the next row, and a transaction that adds a row first checks whether there is a head. Both hold the *gate*, an advisory lock of
the key, until they commit, so that check and write are atomic. Otherwise a row could be added behind a head that is just being
settled, and would never be promoted.

The gate is held only briefly, never while a handler runs. The *run lock* of the key is held while a handler runs, and no
transaction waits for it. It separates rows that are due out of order, such as a dead letter that was skipped and is retried.

These locks cannot deadlock. Gates are acquired in sorted order, before any row is locked for adding. Under a gate only a
`waiting` row is locked, and another transaction that has locked such a row does not wait for a gate. On SQLite, which has one
writer, the write lock replaces them.

Every path that removes a row from the order must promote the next one: `hold_gates`, write, `promote_next`. If a path omits
that, the key makes no progress until `release_stuck` finds it.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from exactly_once.sql.connections import LONGEST_IDLE, READ_COMMITTED, execute, fetch, is_outermost, is_postgresql, set_local
from exactly_once.sql.days import LIVE
from exactly_once.sql.now import NOW, NOW_AFTER
from exactly_once.sql.prepared_statements import KEEP_PLANS, PreparedStatement, execute_script, is_usable
from inbox.models import InboxMessage
from inbox.states import PROMOTE, State
from inbox.store.dialect import IS_OPEN, TABLE, as_bound, columns_of, run
from inbox.store.due import CLAIM, NOT_PAUSED, first_due
from inbox.store.message_rows import OrderedKey
from inbox.store.trail_entries import record

OPEN = f"ordered AND NOT (state IN ('done', 'skipped', 'shed')) AND {IS_OPEN}"
"""True for rows with a place in the order, as in the index `inbox_order`."""
GATE = (
    "pg_advisory_xact_lock({gate}), set_config('idle_in_transaction_session_timeout', "
    "coalesce({bound}, current_setting('idle_in_transaction_session_timeout')), true), "
    f"CASE WHEN {{ends}} THEN concat({KEEP_PLANS}, set_config('DateStyle', 'ISO', true), "
    "set_config('client_encoding', 'UTF8', true)) END"
)
"""For the RETURNING of the statement that settles a row: hold its gate, and limit how long a frozen process may hold it.

If `FOLLOW` ends the transaction, also the settings of that: of its plan, and of its answer, which is read after the commit.
"""
FOLLOWING = "nullif(current_setting('inbox.following', true), '')::bigint[]"
"""Id and fence of the row that `FOLLOW` has claimed in this session. The planner reads them, too, also if there is none."""
RUN_LOCK = f"pg_try_advisory_xact_lock(hashtextextended(key, hashtextextended('{TABLE} run ' || handler, 0)))"
"""For a row: acquire the run lock of its key for the transaction, if it is free. Two keys with the same number exclude each
other."""
PLACE = "COALESCE(place, id)"
_HEAD = f"SELECT id, state FROM {TABLE} WHERE handler = {{}} AND key = {{}} AND {OPEN} ORDER BY {PLACE} LIMIT 1"
_PROMOTE = (
    f"UPDATE {TABLE} SET state = 'received', attempts = attempts + {{attempts}}, fence = fence + 1, next_attempt_at = {{due}}"
)
_READ_COMMITTED = "read committed"
LOCK_TIMEOUT = timedelta(seconds=10)
_KEYS_AT_ONCE = 10_000


def for_gate(connection: BaseDatabaseWrapper, order: OrderedKey | None, *, is_followed: bool) -> list[Any]:
    """The parameters of `GATE`: the lock, the limit, and does `FOLLOW` end the transaction? Without an order there is no gate.

    No setting is left in a caller's transaction.
    """
    ends = is_outermost(connection)
    gate = [None, None] if order is None else [_gate(*order), as_bound(LONGEST_IDLE) if ends else None]
    return [*gate, is_followed and ends]


def hold_gates(alias: str, handler: str, keys: Iterable[str]) -> None:
    """Hold the gates of these keys until the open transaction ends; waits for their current holders.

    Call it before adding rows of an order, and before `promote_next`. Read the rows in a later statement and under READ
    COMMITTED; otherwise the read would return the state before the wait.
    """
    connection = connections[alias]
    gates = sorted({_gate(handler, key) for key in keys if key})
    if not gates or not is_postgresql(connection):
        return
    fetch(connection, "SELECT pg_advisory_xact_lock(gate) FROM unnest(%s::bigint[]) gate", [gates])


def promote_next(alias: str, handler: str, key: str) -> int | None:
    """waiting → received, due now, for the head of the key; its row. None if the head is not waiting, or there is none.

    Call it under the gate, in the transaction that settled a row of the key or took its place.
    """
    connection = connections[alias]
    while True:
        if is_postgresql(connection):
            found = run(PROMOTE_HEAD, connection, [handler, key])
        else:
            found = fetch(connection, _PROMOTE_ON_SQLITE, [handler, key])
        ((state, promoted),) = found or [(None, None)]
        if promoted is None and state == State.WAITING:
            continue  # an operator has skipped it between our read and our write
        if promoted is not None:
            record(alias, [promoted], was=State.WAITING, matters=PROMOTE.recorded)
        return None if promoted is None else int(promoted)


def promote_behind(alias: str, order: OrderedKey | None) -> None:
    """Acquire the gate of an order and promote its next row, in the transaction in which a row has left it. None: nothing."""
    if order is not None:
        hold_gates(alias, order.handler, [order.key])
        promote_next(alias, *order)


def for_follow(order: OrderedKey | None, claimed_for: timedelta, in_turn: Sequence[str]) -> list[Any]:
    """The parameters of `FOLLOW`."""
    return [*(order or (None, None)), claimed_for.total_seconds(), json.dumps(in_turn)]


def promote_after_commit(alias: str, order: OrderedKey) -> None:
    """Promote its head in a transaction of its own. If the process crashes before, `release_stuck` makes it."""
    transaction.on_commit(partial(_promote_in_own_transaction, alias, order), using=alias, robust=True)


_HEAD_PROMOTED = (
    f"WITH head AS MATERIALIZED ({_HEAD.format('$1', '$2')}), "
    "promoted AS ({promote} FROM head "
    # CASE prevents an index of all waiting rows: see the sentinel.
    f"WHERE {TABLE}.id = head.id AND {TABLE}.{IS_OPEN} AND head.state = 'waiting' "
    f"AND CASE WHEN {TABLE}.state = 'waiting' THEN TRUE ELSE FALSE END {{also}} RETURNING {{returned}})"
)
PROMOTE_HEAD = PreparedStatement(
    "inbox_promote",
    ["text", "text"],
    _HEAD_PROMOTED.format(promote=_PROMOTE.format(attempts=0, due=NOW["postgresql"]), also="", returned=f"{TABLE}.id")
    + " SELECT head.state, promoted.id FROM head LEFT JOIN promoted ON true",
)
_PROMOTE_ON_SQLITE = (
    f"{_PROMOTE.format(attempts=0, due=NOW['sqlite'])} "
    f"WHERE state = 'waiting' AND id = (SELECT id FROM ({_HEAD.format('%s', '%s')})) RETURNING state, id"
)
_CLAIMED_FOR = NOW_AFTER["postgresql"] % "$3"
_EXEMPT = "AND NOT stopping AND (attempts = 0 OR state = 'retrying')"
"""Nothing of a message is to be written besides its claim, and it is not quarantined."""
FOLLOW = PreparedStatement(
    "inbox_follow",
    ["text", "text", "float8", "json"],
    _HEAD_PROMOTED.format(
        promote=_PROMOTE.format(attempts=1, due=_CLAIMED_FOR),
        also=f"AND {NOT_PAUSED.format(name='$1')}",
        returned=columns_of(TABLE),
    )
    + f", due AS MATERIALIZED ({first_due('postgresql', _EXEMPT).replace('%s', '$4')}), "
    f"claimed AS ({CLAIM.format(after=_CLAIMED_FOR)} FROM due WHERE m.id = due.id AND m.{IS_OPEN} "
    # Not EXISTS: a scalar is read first, and then nothing is searched for.
    "AND (SELECT state FROM head) IS DISTINCT FROM 'waiting' "
    f"RETURNING {columns_of('m')}) "
    "SELECT (SELECT state FROM head), following.*, "
    "set_config('inbox.following', ARRAY[following.id, following.fence]::text, false) FROM (SELECT) one "
    "LEFT JOIN (SELECT * FROM promoted UNION ALL SELECT * FROM claimed) following ON true",
)
"""Promote the head of a key if it is waiting, and claim it. Else claim a due message of the given handler.

Its one row: the state of the head, the columns of the claimed row, or NULL, and `FOLLOWING`. If the head is waiting and nothing
was claimed, its handler is paused, or an operator has skipped it between the read and the write of the statement.
"""


def is_head(alias: str, handler: str, key: str, place: int) -> bool:
    """Does no open row of the key precede this place? Under the gate."""
    before = f"SELECT 1 FROM {TABLE} WHERE handler = %s AND key = %s AND {OPEN} AND {PLACE} < %s LIMIT 1"
    return not fetch(connections[alias], before, [handler, key, place])


def sees_every_commit(isolation: str) -> bool:
    """Does a statement see rows that were added while its transaction was open? "" is SQLite."""
    return isolation in {"", _READ_COMMITTED}


@contextmanager
def deciding(alias: str, longest_wait: timedelta = LOCK_TIMEOUT) -> Iterator[None]:
    """A short transaction for decisions under gates: READ COMMITTED whatever the project's default is, with time limits.

    Nested in another transaction, such as an admin request's, it is a savepoint and has the isolation of that transaction.
    """
    connection = connections[alias]
    usable = is_usable(connection)  # it may query, before which the transaction must not have begun
    with transaction.atomic(using=alias):
        if is_postgresql(connection) and is_outermost(connection):
            if usable:
                execute_script(connection, limits(longest_wait))
            else:
                execute(connection, limits(longest_wait))
        yield


def limits(longest_wait: timedelta) -> str:
    """The statements that begin a transaction of `deciding`."""
    return READ_COMMITTED + set_local(idle_in_transaction_session_timeout=LONGEST_IDLE, lock_timeout=longest_wait)


@dataclass(frozen=True, kw_only=True)
class Released:
    """What `release_stuck` found.

    Attributes:
        stuck: number of keys whose head was waiting. It should be 0.
        passed: number of dead letters that were removed from the order.
        up_to: the last key that was checked; None if there are no more.
    """

    stuck: int
    passed: int
    up_to: OrderedKey | None


def release_stuck(alias: str, passing: Sequence[str], after: OrderedKey | None) -> Released:
    """Repair: promote every head that is `waiting`, because no other path will.

    Also remove dead letters from the order of the handlers in `passing`, those with Ordered(on_dead="skip"): dead letters from
    before the handler had that option, or of handlers that committed by themselves.
    """
    heads = _heads(alias, after or OrderedKey("", ""))
    stuck = [order for order, _, state in heads if state == State.WAITING]
    dead = [(order, row) for order, row, state in heads if state == State.DEAD and order.handler in passing]
    normal = not stuck or _is_read_committed(alias)
    # Otherwise a key is promoted just after the commit, and `_heads` may have read in between.
    return Released(
        stuck=sum(_promote_in_own_transaction(alias, order) is not None for order in stuck) * normal,
        passed=sum(_remove_from_order(alias, order, row) for order, row in dead),
        up_to=heads[-1][0] if len(heads) == _KEYS_AT_ONCE else None,
    )


def _heads(alias: str, after: OrderedKey) -> list[tuple[OrderedKey, int, str]]:
    """The head of every key, by a skip scan over the index, which does not read the rows behind the heads."""
    connection = connections[alias]
    if is_postgresql(connection):
        following = (
            f"SELECT handler, key, id, state FROM {TABLE} WHERE {OPEN} AND (handler, key) > ({{}}) "
            f"ORDER BY handler, key, {PLACE} LIMIT 1"
        )
        sql = (
            f"WITH RECURSIVE heads AS (({following.format('%s, %s')}) UNION ALL SELECT head.* FROM heads, "
            f"LATERAL ({following.format('heads.handler, heads.key')}) head) SELECT * FROM heads LIMIT {_KEYS_AT_ONCE}"
        )
    else:
        # SQLite takes id and state from the row that has the minimum.
        sql = (
            f"SELECT handler, key, id, state, min({PLACE}) FROM {TABLE} WHERE {OPEN} AND (handler, key) > (%s, %s) "
            f"GROUP BY handler, key ORDER BY handler, key LIMIT {_KEYS_AT_ONCE}"
        )
    return [(OrderedKey(handler, key), row, state) for handler, key, row, state, *_ in fetch(connection, sql, after)]


def _promote_in_own_transaction(alias: str, order: OrderedKey) -> int | None:
    with deciding(alias):
        hold_gates(alias, order.handler, [order.key])
        return promote_next(alias, *order)


def _remove_from_order(alias: str, order: OrderedKey, row: int) -> bool:
    with deciding(alias):
        dead = InboxMessage.objects.using(alias).filter(pk=row, day=LIVE, state=State.DEAD, ordered=True)
        passed = bool(dead.update(ordered=False))
        promote_behind(alias, order if passed else None)
        return passed


def _is_read_committed(alias: str) -> bool:
    connection = connections[alias]
    if not is_postgresql(connection):
        return True
    with transaction.atomic(using=alias):
        return all(sees_every_commit(isolation) for (isolation,) in fetch(connection, "SHOW transaction_isolation"))


def _gate(handler: str, key: str) -> int:
    """The number of the gate of a key. Two keys with the same number only wait for each other."""
    digest = hashlib.blake2b(f"{TABLE} gate\0{handler}\0{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)
