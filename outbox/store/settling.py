"""What became of messages: the relay's transitions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import Error, connections, transaction

from outbox.kernel.clock import now_after
from outbox.kernel.faults import is_canceled, may_be_of_a_row
from outbox.kernel.schema import is_missing
from outbox.kernel.text import ERROR_LENGTH, printable
from outbox.models import HOLDING_KEY, OutboxMessage, State
from outbox.store.calling import note_calls
from outbox.store.dialect import TABLE, any_of, is_postgresql, now
from outbox.store.trail import is_noted, note

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_HOLDING = ", ".join(f"'{state}'" for state in HOLDING_KEY)
_MOST_ATTEMPTS = 2**31 - 2
_MOST_TRIES = 100
"""Savepoints that look for the rows that cannot be settled; the rest of the batch is left for the next pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Messages that failed together, with the same words after as many attempts.

    Attributes:
        retry_after: rest until the next attempt; None when it was the last.
        tried: False when they were only put off, which is not an attempt.
        matters: to a person who reads the trail; not when it only goes on as before.
    """

    positions: Sequence[int]
    error: str
    retry_after: timedelta | None
    tried: bool = True
    matters: bool = True


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """What became of a batch: positions by outcome. A row named nowhere stays ready and is sent again."""

    published: Sequence[int] = ()
    expired: Sequence[int] = ()
    waiting: Sequence[int] = ()
    failed: Sequence[Failure] = ()

    @property
    def dead(self) -> list[int]:
        return [position for failure in self.failed if failure.retry_after is None for position in failure.positions]

    @property
    def positions(self) -> list[int]:
        """In their order."""
        failed = (position for failure in self.failed for position in failure.positions)
        return sorted([*self.published, *self.expired, *self.waiting, *failed])

    def of(self, positions: Collection[int]) -> Settlement:
        """What it says of these."""

        def among(given: Sequence[int]) -> list[int]:
            return [position for position in given if position in positions]

        return Settlement(
            published=among(self.published),
            expired=among(self.expired),
            waiting=among(self.waiting),
            failed=[replace(failure, positions=some) for failure in self.failed if (some := among(failure.positions))],
        )


@dataclass(frozen=True, kw_only=True)
class SettledApart:
    """What became of a settlement that the database has refused as a whole.

    Attributes:
        settlement: what of it is stored.
        changed: how many rows have changed.
        refused: by position, why the database does not change that row.
    """

    settlement: Settlement
    changed: int
    refused: Mapping[int, Error]


def settle(alias: str, settlement: Settlement) -> int:
    """ready → published | expired | waiting | retrying | dead, inside the claim; how many rows changed.

    The claim has locked these rows, so no other session makes this wait.
    """
    connection = connections[alias]
    at = now(connection)
    published = f", attempts = {_one_more(connection, '1')}, last_error = '', settled_at = {at}"
    changed = _change(connection, settlement.published, State.PUBLISHED, published, [], matters=False)
    changed += _change(connection, settlement.expired, State.EXPIRED, f", settled_at = {at}", [])
    changed += _change(connection, settlement.waiting, State.WAITING, "", [], matters=False)
    changed += sum(_fail(connection, failure) for failure in settlement.failed)
    note_calls(connection, [*settlement.published, *settlement.dead])
    return changed


def may_settle_apart(error: BaseException, rows: int) -> bool:
    """So many rows could not be settled: may some of them be settled?"""
    # What took too long is tried with fewer first.
    return may_be_of_a_row(error) and not is_missing(error) and not (is_canceled(error) and rows > 1)


def settle_apart(alias: str, settlement: Settlement, keys: Mapping[int, str]) -> SettledApart:
    """`settle` in parts, which are halved down to the rows that the database refuses; inside an open transaction.

    The later rows of their keys are left as well, because they are to be sent again after them.

    Args:
        keys: of the messages, by position.

    Raises:
        django.db.Error: an error that is not of these rows.
    """
    connection = connections[alias]
    if is_postgresql(connection):
        with connection.cursor() as cursor:
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
    parts, tries = [settlement.positions], 0
    settled: set[int] = set()
    refused: dict[int, Error] = {}
    changed = 0
    while parts and tries < _MOST_TRIES:
        stopped = {key for position in refused if (key := keys.get(position))}
        part = [position for position in parts.pop() if keys.get(position) not in stopped]
        if not part:
            continue
        tries += 1
        try:
            with transaction.atomic(using=alias):
                count = settle(alias, settlement.of(set(part)))
        except Error as error:
            if not may_settle_apart(error, len(part)):
                raise
            if len(part) == 1:
                refused[part[0]] = error
            else:
                half = len(part) // 2
                parts += [part[half:], part[:half]]
        else:
            changed += count
            settled.update(part)
    return SettledApart(settlement=settlement.of(settled), changed=changed, refused=refused)


def rehearse(alias: str, keys: Mapping[int, str]) -> SettledApart:
    """What `settle_apart` would do if these were published. Nothing stays changed.

    Args:
        keys: of the messages, by position.
    """
    with transaction.atomic(using=alias):
        apart = settle_apart(alias, Settlement(published=list(keys)), keys)
        transaction.set_rollback(True, using=alias)
    return apart


def _fail(connection: BaseDatabaseWrapper, failure: Failure) -> int:
    written = f", attempts = {_one_more(connection, '%s')}, last_error = %s, "
    parameters: list[Any] = [int(failure.tried), printable(failure.error, ERROR_LENGTH)]
    if failure.retry_after is None:
        became, written = State.DEAD, f"{written}settled_at = {now(connection)}"
    else:
        # No later than it expires, because until then it holds up its key.
        earliest = "LEAST({}, expires_at)" if is_postgresql(connection) else "MIN({}, COALESCE(expires_at, '9999'))"
        became, written = State.RETRYING, f"{written}available_at = {earliest.format(now_after(connection))}"
        parameters.append(failure.retry_after.total_seconds())
    return _change(connection, failure.positions, became, written, parameters, reason=failure.error, matters=failure.matters)


def _one_more(connection: BaseDatabaseWrapper, attempt: str) -> str:
    """The attempts so far plus `attempt`. A number at the end of its type, written by hand, must not fail the batch."""
    return f"{'LEAST' if is_postgresql(connection) else 'MIN'}(attempts, {_MOST_ATTEMPTS}) + {attempt}"


def _change(
    connection: BaseDatabaseWrapper,
    positions: Sequence[int],
    became: State,
    written: str,
    parameters: Sequence[Any],
    *,
    reason: str = "",
    matters: bool = True,
) -> int:
    """ready → `became` for these, and their trail; how many rows changed."""
    if not positions:
        return 0
    noted = is_noted(matters=matters)
    condition, among = any_of(connection, positions)
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {TABLE} SET state = '{became.value}'{written} WHERE id {condition} AND state = 'ready'"
            f"{' RETURNING id' if noted else ''}",
            [*parameters, among],
        )
        if not noted:
            return int(cursor.rowcount)
        changed = [position for (position,) in cursor.fetchall()]
    note(connection.alias, changed, was=State.READY, became=became, reason=reason, matters=matters)
    return len(changed)


PUT_OFF = "not tried: the broker refuses messages of this topic at the moment"
"""The error of a message that was put off because of its topic."""


def topics_put_off(alias: str) -> list[str]:
    """Topics of which some relay has put messages off."""
    put_off = OutboxMessage.objects.using(alias).filter(state=State.RETRYING, last_error=PUT_OFF)
    return list(put_off.values_list("topic", flat=True).distinct())


def recall(alias: str, topic: str, limit: int, among: Iterable[int]) -> int:
    """retrying → ready for up to `limit` messages of `topic` that were put off, in the shards `among`; how many."""
    connection = connections[alias]
    mine, shards = any_of(connection, list(among))
    return _make_ready(
        connection,
        f"SELECT id FROM {TABLE} WHERE state = 'retrying' AND topic = %s AND last_error = %s AND shard {mine} ORDER BY id "
        f"LIMIT %s {_locking(connection)}",
        [topic, PUT_OFF, shards, limit],
    )


def promote_rested(alias: str, limit: int) -> int:
    """retrying → ready for up to `limit` messages whose rest is over; how many."""
    return _promote(alias, State.RETRYING, limit)


def promote_due(alias: str, limit: int) -> int:
    """scheduled → ready for up to `limit` messages whose time has come; how many. For a relay without a timer beside it."""
    return _promote(alias, State.SCHEDULED, limit)


def _promote(alias: str, state: State, limit: int) -> int:
    connection = connections[alias]
    due = f"state = '{state.value}' AND available_at <= {now(connection)} ORDER BY available_at, id LIMIT %s"
    found = f"SELECT id FROM {TABLE} WHERE {due} {_locking(connection)}"
    return _make_ready(connection, found, [limit], "state = 'ready'")


def release_waiting(alias: str, *, keys: int, each: int) -> int:
    """waiting → ready for up to `keys` keys whose head is out of trouble, the first `each` messages of every one; how many.

    The keys are found one by one along the index, however many messages wait behind each.
    """
    connection = connections[alias]
    holding = f"FROM {TABLE} h WHERE h.state IN ({_HOLDING}) AND h.key <> ''"
    with connection.cursor() as cursor:
        cursor.execute(
            # The first of each key that is failed or waits, one key after the other along the index.
            "WITH RECURSIVE heads(key, state) AS ("
            f"SELECT * FROM (SELECT h.key, h.state {holding} ORDER BY h.key, h.id LIMIT 1) head "
            f"UNION ALL SELECT next.key, next.state FROM heads JOIN {TABLE} next ON next.id = "
            f"(SELECT h.id {holding} AND h.key > heads.key ORDER BY h.key, h.id LIMIT 1)) "
            "SELECT key FROM heads WHERE state = 'waiting' LIMIT %s",
            [keys],
        )
        free = [key for (key,) in cursor.fetchall()]
    first_of = f"SELECT id FROM {TABLE} WHERE state = 'waiting' AND key <> '' AND key = {{key}} ORDER BY id LIMIT %s"
    if not is_postgresql(connection):
        return sum(_make_ready(connection, first_of.format(key="%s"), [key, each]) for key in free)
    first = f"{first_of.format(key='free.key')} {_locking(connection)}"
    return _make_ready(
        connection, f"SELECT w.id FROM unnest(%s::text[]) AS free(key) CROSS JOIN LATERAL ({first}) w", [free, each]
    )


def _make_ready(connection: BaseDatabaseWrapper, found: str, parameters: Sequence[Any], written: str = "") -> int:
    """Those that the query `found` finds, and locks, become ready; how many.

    They are locked where they are found, so that no condition is needed at the update, and found once: PostgreSQL may execute a
    subquery with a LIMIT anew for every row of the other side of a join, each time locking and finding others, when its
    statistics are of another time. An array it computes once.
    """
    among = f"= ANY(ARRAY({found}))" if is_postgresql(connection) else f"IN ({found})"
    written = written or f"state = 'ready', available_at = {now(connection)}"
    if is_noted(matters=False):
        return _make_ready_and_tell(connection, among, parameters, written)
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {TABLE} SET {written} WHERE id {among}", parameters)
        count: int = cursor.rowcount
    return count


def _make_ready_and_tell(connection: BaseDatabaseWrapper, among: str, parameters: Sequence[Any], written: str) -> int:
    """The same in several statements, because an UPDATE does not tell what it found."""
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        cursor.execute(f"SELECT id, state FROM {TABLE} WHERE id {among}", parameters)
        found = dict(cursor.fetchall())
        if found:
            condition, parameter = any_of(connection, list(found))
            cursor.execute(f"UPDATE {TABLE} SET {written} WHERE id {condition}", [parameter])
        for was in sorted(set(found.values())):
            moved = [position for position, state in found.items() if state == was]
            note(connection.alias, moved, was=was, became=State.READY, matters=False)
    return len(found)


def _locking(connection: BaseDatabaseWrapper) -> str:
    return "FOR UPDATE SKIP LOCKED" if is_postgresql(connection) else ""
