"""The relay's transitions: settling the messages of a batch, and making retrying, scheduled and waiting messages ready."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, cast

from django.db import connections, transaction

from exactly_once.failures import REFUSED
from exactly_once.sql.connections import fetch, is_outermost, is_postgresql
from exactly_once.sql.now import now
from exactly_once.sql.prepared_statements import is_usable
from exactly_once.states import Transition
from exactly_once.wire.text import ERROR_LENGTH, printable
from outbox.conf import outbox_options
from outbox.states import CONFIRM, DIE, EXPIRE, FIRE, HOLD, RELEASE, RETRY, TRY_AGAIN, State
from outbox.store.dialect import EVER, any_of, array_of, array_of_places, live
from outbox.store.messages import HOLDING
from outbox.store.paused_topics import pause_in_hand
from outbox.store.pending_callbacks import needed_by_callbacks, record_calls, topics_with_callbacks
from outbox.store.transitions import Found, count_moved, delete, is_recorded, move, move_and_commit
from outbox.store.unwritable_rows import SAVEPOINT, Changed, Rows, UnwritableRows, change_in_parts, change_writable

_MOST_OF_A_KEY = 100
"""A pass sends as many messages of a key at most, and reads past all of its ready ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Messages that failed with the same error and the same number of attempts.

    Attributes:
        error_class: why it failed, in one word, for grouping.
        retry_after: backoff until the next attempt; None if this attempt was the last.
        matters: whether the trail records it; False if it only repeats the failure before.
    """

    positions: Sequence[int]
    error: str
    error_class: str = REFUSED
    retry_after: timedelta | None
    matters: bool = True


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """The outcomes of a batch: positions by outcome. A row without an outcome stays ready and is sent again.

    Attributes:
        paused: by paused topic, the messages that were not sent.
    """

    published: Sequence[int] = ()
    expired: Sequence[int] = ()
    waiting: Sequence[int] = ()
    failed: Sequence[Failure] = ()
    paused: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def positions(self) -> list[int]:
        """All positions, in ascending order."""
        failed = (position for failure in self.failed for position in failure.positions)
        return sorted([*self.published, *self.expired, *self.waiting, *chain(*self.paused.values()), *failed])

    def of(self, chosen: Collection[int]) -> Settlement:
        """The outcomes of the `chosen` positions only."""

        def among(given: Sequence[int]) -> list[int]:
            return [position for position in given if position in chosen]

        return Settlement(
            published=among(self.published),
            expired=among(self.expired),
            waiting=among(self.waiting),
            failed=[replace(failure, positions=some) for failure in self.failed if (some := among(failure.positions))],
            paused={topic: some for topic, positions in self.paused.items() if (some := among(positions))},
        )


def settle(alias: str, settlement: Settlement) -> int:
    """Store the outcomes of a batch, inside the claim's transaction; the number of changed rows.

    The claim has locked these rows, so no other session makes this wait.
    """
    changed = _publish(alias, settlement.published)
    changed += len(move(alias, EXPIRE, settlement.expired))
    changed += count_moved(alias, HOLD, settlement.waiting)
    changed += sum(_fail(alias, failure) for failure in settlement.failed)
    return changed + pause_in_hand(alias, settlement.paused)


def _publish(alias: str, positions: Sequence[int]) -> int:
    """Without history, delete published messages, except those that callbacks need."""
    if outbox_options().keeps_successes:
        return _settle(alias, CONFIRM, positions)
    deleted = delete(alias, CONFIRM, positions, unless=needed_by_callbacks(CONFIRM))
    return deleted if deleted == len(positions) else deleted + _settle(alias, CONFIRM, positions)


def _settle(alias: str, transition: Transition, positions: Sequence[int], **options: Any) -> int:
    """Apply a transition, and record the callbacks of the messages; the number of changed rows."""
    if not topics_with_callbacks(transition):
        return count_moved(alias, transition, positions, **options)
    moved = move(alias, transition, positions, **options)
    record_calls(connections[alias], {one.message_id: one.day for one in moved})
    return len(moved)


def settle_writable(alias: str, settlement: Settlement, places: Mapping[int, str]) -> tuple[Settlement, Changed]:
    """`settle` as far as the database changes the rows, inside an open transaction; the outcomes that are stored.

    Later messages of the keys of unwritable rows are not settled either, so that they are sent again after them.

    Args:
        places: by position, where the database has stored the claimed rows.
    """
    last = partial(_confirm_and_commit, alias, places) if _is_last(alias, settlement) else None
    changed = change_writable(alias, settlement.positions, partial(_settle_some, alias, settlement), last)
    return settlement.of(changed.done or ()) if changed.unwritable else settlement, changed


def _is_last(alias: str, settlement: Settlement) -> bool:
    """Can these outcomes be stored by one statement, which ends the pass's transaction?"""
    connection = connections[alias]
    return (
        len(settlement.published) == len(settlement.positions)
        and outbox_options().keeps_successes
        and not topics_with_callbacks(CONFIRM)
        and not is_recorded(decision=CONFIRM.recorded)
        and is_usable(connection)
        and is_outermost(connection)
    )


def _confirm_and_commit(alias: str, places: Mapping[int, str], rows: Rows) -> int:
    # A locked row stays where it is.
    locked = array_of_places(places[position] for position in cast("Sequence[int]", rows))
    return move_and_commit(alias, CONFIRM, Found("SELECT unnest(%s::tid[])", [locked], "", "ctid"), before=SAVEPOINT)


def rehearse(alias: str, positions: Sequence[int]) -> Changed:
    """The result of settling these messages as published; rolled back."""
    with transaction.atomic(using=alias):
        changed = change_in_parts(alias, positions, partial(_settle_some, alias, Settlement(published=positions)))
        transaction.set_rollback(True, using=alias)
    return changed


def _settle_some(alias: str, settlement: Settlement, rows: Rows) -> int:
    return settle(alias, settlement.of(set(cast("Sequence[int]", rows))))


def _fail(alias: str, failure: Failure) -> int:
    error = printable(failure.error, ERROR_LENGTH)
    transition = DIE
    given: dict[str, Any] = {"error": error, "error_class": failure.error_class}
    if failure.retry_after is not None:
        transition = RETRY
        given["delay"] = failure.retry_after
    return _settle(alias, transition, failure.positions, reason=failure.error, recorded=failure.matters, **given)


def make_retrying_ready(alias: str, limit: int, unwritable: UnwritableRows | None = None, since: str = EVER) -> int:
    """Apply retrying → ready to up to `limit` messages whose backoff has ended `since` an instant; returns their number."""
    return _make_due_ready(alias, TRY_AGAIN, limit, unwritable or UnwritableRows(alias), since)


def make_scheduled_ready(alias: str, limit: int, unwritable: UnwritableRows | None = None) -> int:
    """Apply scheduled → ready to up to `limit` due messages; returns their number. For a relay without a timer."""
    return _make_due_ready(alias, FIRE, limit, unwritable or UnwritableRows(alias))


def _make_due_ready(alias: str, transition: Transition, limit: int, unwritable: UnwritableRows, since: str = EVER) -> int:
    connection = connections[alias]
    (source,) = transition.sources
    due, parameters = f"state = '{source}' AND available_at <= {now(connection)}", []
    if since != EVER:
        due, parameters = f"{due} AND available_at >= %s", [since]
    if skipped := unwritable.skipped():
        among, positions = any_of(connection, list(skipped))
        due, parameters = f"{due} AND NOT id {among}", [*parameters, positions]
    found = Found(f"SELECT id FROM {live(connection)} WHERE {due} ORDER BY available_at, id LIMIT %s", [*parameters, limit])
    return unwritable.change(found, partial(count_moved, alias, transition))


def release_waiting(
    alias: str, after: str = "", *, keys: int, most: int, unwritable: UnwritableRows | None = None
) -> tuple[int, str]:
    """Apply waiting → ready to the first messages of those of the next `keys` held keys that no message blocks.

    The keys are found by one index lookup each, however many messages wait behind each. Keys of unwritable rows are skipped.

    Args:
        after: the key that was reached before.
        most: the number of messages that become ready, in equal parts of all keys.

    Returns:
        The number of messages, and the key that was reached; "" after the last one.
    """
    unwritable = unwritable or UnwritableRows(alias)
    connection = connections[alias]
    table = live(connection)
    holding = f"FROM {table} h WHERE h.state IN ({HOLDING}) AND h.key <> '' AND h.key >"
    first = "ORDER BY h.key, h.id LIMIT 1"
    heads = fetch(
        connection,
        # The first failed, paused or waiting message of each key, one key after the other along the index.
        "WITH RECURSIVE heads(key, state, id) AS ("
        f"SELECT * FROM (SELECT h.key, h.state, h.id {holding} %s {first}) head "
        f"UNION ALL SELECT next.key, next.state, next.id FROM heads JOIN {table} next ON next.id = "
        f"(SELECT h.id {holding} heads.key {first})) SELECT key, state, id FROM heads LIMIT %s",
        [after, keys],
    )
    reached = heads[-1][0] if len(heads) == keys else ""
    skipped = {*unwritable.skipped().values()}
    free = {key: head for key, state, head in heads if state == State.WAITING and key not in skipped}
    if not free:
        return 0, reached
    each = min(-(-most // len(free)), _MOST_OF_A_KEY)
    release = partial(count_moved, alias, RELEASE)
    first_of = f"SELECT id FROM {table} WHERE state = 'waiting' AND key <> '' AND key = {{key}} ORDER BY id LIMIT %s"
    if not is_postgresql(connection):
        each_key = ((key, Found(first_of.format(key="%s"), [key, each])) for key in free)
        return sum(unwritable.change(found, release, [key]) for key, found in each_key), reached
    first = f"{first_of.format(key='free.key')} FOR UPDATE SKIP LOCKED"
    # Behind a head that another session has locked, they would wait again.
    head = f"SELECT FROM {table} WHERE id = free.head AND state = 'waiting' FOR UPDATE SKIP LOCKED"
    found = (
        "SELECT w.id FROM unnest(%s::text[], %s::bigint[]) AS free(key, head) "
        f"CROSS JOIN LATERAL ({head}) h CROSS JOIN LATERAL ({first}) w"
    )
    query = Found(found, [[*free], array_of(free.values()), each], locking="")
    return unwritable.change(query, release, free), reached
