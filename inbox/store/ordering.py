"""The order of a key: who is at its head, and who follows when the head is settled.

A row with `ordered` has a place in the order of its handler and key: its id, or, if it replaces another row, that row's place.
The first open one is the *head*. It alone is due; all others are `waiting`. Whoever settles the head lets the next one follow
in the same transaction, and whoever adds a row looks first whether there is a head. Both hold the *gate* of the key until they
commit, so that looking and writing are one; otherwise a row could be added behind a head that is just leaving, and nobody
would ever wake it.

The gate is held for moments only, never while a handler runs. What is held while a handler runs is the *run* lock of the
key, which nobody waits for: it keeps those apart that are due out of order, such as a dead letter that was passed over and is
retried by an operator.

No two of these wait for each other. Gates are taken in one order, before any row is locked for adding; under a gate only a
`waiting` row is locked, and whoever else has such a row locked waits for no gate. On SQLite, which has one writer, the
writer's lock is all of that.

Every path that takes a row out of the order must pass it on: `hold_gates`, write, `promote_next`. What is forgotten there
stands still until `release_stuck` finds it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction

from inbox.models import InboxMessage, State
from inbox.store.dialect import TABLE
from inbox.store.rows import OrderedKey
from inbox.store.trail import note
from outbox.database.connections import is_postgresql
from outbox.database.now import NOW_AFTER, now_after
from outbox.database.prepared_statements import PreparedStatement, is_usable

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

OPEN = "ordered AND state IN ('received', 'retrying', 'waiting', 'running', 'dead')"
"""Who has a place in the order, as the index `inbox_order` knows it."""
GATE = (
    "pg_advisory_xact_lock({gate}), set_config('idle_in_transaction_session_timeout', "
    "coalesce({bound}, current_setting('idle_in_transaction_session_timeout')), true)"
)
"""For the RETURNING of the statement that settles a row: hold its gate, and bound how long this process may sleep with it."""
PLACE = "COALESCE(place, id)"
_HEAD = f"SELECT id, state FROM {TABLE} WHERE handler = {{}} AND key = {{}} AND {OPEN} ORDER BY {PLACE} LIMIT 1"
_PROMOTE = f"UPDATE {TABLE} SET state = 'received', attempts = attempts + {{attempts}}, next_attempt_at = {{due}}"
_READ_COMMITTED = "read committed"
_LONGEST_SLEEP_MS = 10_000
"""After which the server ends the transaction of a process that was frozen with a gate in its hands."""
_LONGEST_WAIT = timedelta(seconds=10)
_KEYS_AT_ONCE = 10_000


def for_gate(connection: BaseDatabaseWrapper, order: OrderedKey) -> list[Any]:
    """The parameters of `GATE`: which one, and how long. Inside the transaction of a test the bound would outlive it."""
    return [_gate(*order), f"{_LONGEST_SLEEP_MS}ms" if len(connection.atomic_blocks) == 1 else None]


def hold_gates(alias: str, handler: str, keys: Iterable[str]) -> None:
    """Hold the gates of these keys until the open transaction ends; waits for those who hold them now.

    Before rows of an order are added, and before `promote_next`. What is looked at under a gate must be looked at by a later
    statement, and the transaction must be READ COMMITTED: any other would see what was there before the wait.
    """
    connection = connections[alias]
    gates = sorted({_gate(handler, key) for key in keys if key})
    if not gates or not is_postgresql(connection):
        return
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(gate) FROM unnest(%s::bigint[]) gate", [gates])


def promote_next(alias: str, handler: str, key: str, *, claimed_for: timedelta | None = None) -> int | None:
    """waiting → received, due now, for the head of the key; its row. None when the head is none that waits, or there is none.

    Under the gate, after a row of the key was settled (done, skipped) or has lost its place, in the same transaction. With
    `claimed_for` it is claimed at once, as `claim_due` does: its attempt is counted, and it is due when that time is over.
    """
    connection = connections[alias]
    claim = [0 if claimed_for is None else 1, (claimed_for or timedelta()).total_seconds()]
    if not is_postgresql(connection):
        promote = _PROMOTE.format(attempts="%s", due=now_after(connection))
        with connection.cursor() as cursor:
            cursor.execute(
                f"{promote} WHERE state = 'waiting' AND id = (SELECT id FROM ({_HEAD.format('%s', '%s')})) RETURNING id",
                [*claim, handler, key],
            )
            promoted = next((row for (row,) in cursor.fetchall()), None)
        return _told(alias, promoted)
    while True:
        ((state, row),) = _promote(connection, [handler, key, *claim]) or [("", None)]
        if row is not None or state != State.WAITING:
            return _told(alias, row)
        # An operator has skipped that one between our look and our write; look again.


def _told(alias: str, promoted: int | None) -> int | None:
    if promoted is not None:
        note(alias, [promoted], was=State.WAITING, matters=False)
    return promoted


def _promote(connection: BaseDatabaseWrapper, given: list[Any]) -> list[tuple[str, int | None]]:
    """What state the head was in, and which row was promoted; nothing when there is no head."""
    if is_usable(connection):
        return [(state, int(row) if row else None) for state, row in _PROMOTE_HEAD.execute(connection, given).rows]
    with connection.cursor() as cursor:
        cursor.execute(_promote_head(*["%s"] * 4), given)
        return list(cursor.fetchall())


def _promote_head(handler: str, key: str, attempts: str, seconds: str) -> str:
    promote = _PROMOTE.format(attempts=attempts, due=NOW_AFTER["postgresql"] % seconds)
    return (
        f"WITH head AS MATERIALIZED ({_HEAD.format(handler, key)}), promoted AS ({promote} FROM head "
        # Not by an index of all that waits: see the sentinel.
        f"WHERE {TABLE}.id = head.id AND head.state = 'waiting' "
        f"AND CASE WHEN {TABLE}.state = 'waiting' THEN TRUE ELSE FALSE END RETURNING {TABLE}.id) "
        "SELECT head.state, promoted.id FROM head LEFT JOIN promoted ON true"
    )


_PROMOTE_HEAD = PreparedStatement("inbox_promote", ["text", "text", "int", "float8"], _promote_head("$1", "$2", "$3", "$4"))


def is_head(alias: str, handler: str, key: str, place: int) -> bool:
    """Is no open row of the key before this place? Under the gate."""
    with connections[alias].cursor() as cursor:
        cursor.execute(
            f"SELECT 1 FROM {TABLE} WHERE handler = %s AND key = %s AND {OPEN} AND {PLACE} < %s LIMIT 1", [handler, key, place]
        )
        return not cursor.fetchall()


def begun(connection: BaseDatabaseWrapper, order: OrderedKey) -> tuple[str, list[Any]]:
    """For the RETURNING of the statement that locks a row to run it: isolation level, and is nobody else running the key?

    The answer is no when the second is false. The lock is held until the transaction ends.
    """
    if not is_postgresql(connection):
        return "'', 1", []
    return "current_setting('transaction_isolation'), pg_try_advisory_xact_lock(%s)", [_lock("run", *order)]


def passes_on(alias: str, order: OrderedKey, isolation: str) -> OrderedKey | None:
    """The order that the sentinel must pass on; None when that is seen to after the commit.

    A transaction that is not READ COMMITTED sees nobody who came while its handler ran. A crash in between leaves the key to
    `release_stuck`.
    """
    if isolation in {"", _READ_COMMITTED}:
        return order
    transaction.on_commit(partial(_promote_by_itself, alias, order), using=alias, robust=True)
    return None


@contextmanager
def deciding(alias: str, longest_wait: timedelta = _LONGEST_WAIT) -> Iterator[None]:
    """A short transaction for what is decided under gates: READ COMMITTED whatever the project's default is, and bounded.

    Nested in another transaction, such as an admin's request, it is a savepoint of that and takes its isolation as it is.
    """
    with transaction.atomic(using=alias):
        connection = connections[alias]
        if is_postgresql(connection) and len(connection.atomic_blocks) == 1:
            with connection.cursor() as cursor:
                cursor.execute(
                    "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; "
                    f"SET LOCAL idle_in_transaction_session_timeout = {_LONGEST_SLEEP_MS}; "
                    f"SET LOCAL lock_timeout = {int(longest_wait.total_seconds() * 1000)}"
                )
        yield


@dataclass(frozen=True, kw_only=True)
class Released:
    """What `release_stuck` found.

    Attributes:
        stuck: keys that waited for nobody. There should be none.
        passed: dead letters that lost their place.
        up_to: where to go on, or None when the last key was seen.
    """

    stuck: int
    passed: int
    up_to: OrderedKey | None


def release_stuck(alias: str, passing: Sequence[str], after: OrderedKey | None) -> Released:
    """The safety net: let the head of every key go on that is `waiting`, which nobody else will ever do.

    It also takes the dead letters out of the order of the handlers in `passing`, those with Ordered(on_dead="skip"), which got
    there before the handler had that option or by committing behind the inbox's back.
    """
    heads = _heads(alias, after or OrderedKey("", ""))
    stuck = [order for order, _, state in heads if state == State.WAITING]
    dead = [(order, row) for order, row, state in heads if state == State.DEAD and order.handler in passing]
    normal = not stuck or _sees_every_commit(alias)
    # Elsewhere a key is released just after the commit, and we may have looked in between.
    return Released(
        stuck=sum(_promote_by_itself(alias, order) is not None for order in stuck) * normal,
        passed=sum(_pass_over(alias, order, row) for order, row in dead),
        up_to=heads[-1][0] if len(heads) == _KEYS_AT_ONCE else None,
    )


def _heads(alias: str, after: OrderedKey) -> list[tuple[OrderedKey, int, str]]:
    """The head of every key, key by key: a skip scan over the index, whatever waits behind the heads."""
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
    with connection.cursor() as cursor:
        cursor.execute(sql, after)
        return [(OrderedKey(handler, key), row, state) for handler, key, row, state, *_ in cursor.fetchall()]


def _promote_by_itself(alias: str, order: OrderedKey) -> int | None:
    with deciding(alias):
        hold_gates(alias, order.handler, [order.key])
        return promote_next(alias, *order)


def _pass_over(alias: str, order: OrderedKey, row: int) -> bool:
    with deciding(alias):
        passed = InboxMessage.objects.using(alias).filter(pk=row, state=State.DEAD, ordered=True).update(ordered=False)
        if passed:
            hold_gates(alias, order.handler, [order.key])
            promote_next(alias, *order)
        return bool(passed)


def _sees_every_commit(alias: str) -> bool:
    connection = connections[alias]
    if not is_postgresql(connection):
        return True
    with transaction.atomic(using=alias), connection.cursor() as cursor:
        cursor.execute("SHOW transaction_isolation")
        return bool(cursor.fetchone()[0] == _READ_COMMITTED)


def _gate(handler: str, key: str) -> int:
    return _lock("gate", handler, key)


def _lock(space: str, handler: str, key: str) -> int:
    """An advisory lock's number. Two keys with one number only wait for each other, which costs time and nothing else."""
    digest = hashlib.blake2b(f"{TABLE} {space}\0{handler}\0{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)
