"""Storing deliveries that are not handled now, in their order, many with one statement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exactly_once.failures import REFUSED
from exactly_once.wire.text import ERROR_LENGTH, printable
from inbox.models import State
from inbox.store.arrivals import count_duplicate
from inbox.store.inserting import Insertion, insert_many
from inbox.store.ordering import hold_gates, promote_next
from inbox.store.rows import Earlier, NewRow, locked_means_busy
from inbox.store.trail import record


@dataclass(frozen=True, kw_only=True, slots=True)
class Incoming:
    """A delivery to be stored.

    Attributes:
        in_order: its handler is ordered, so if it has a key, it gets a place in the order of that key.
        refused: why it is a dead letter from the start, or "".
        shed: why it is not handled at all, or "".
        quarantined: it is refused by the maximum message age, see `decisions.override_maximum_age`.
        redelivered: the broker says that it has delivered this message before.
    """

    row: NewRow
    in_order: bool = False
    refused: str = ""
    shed: str = ""
    quarantined: bool = False
    redelivered: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """The outcome of storing it.

    Attributes:
        state: the state that it was stored in; "" if it is a duplicate.
        earlier: the row of a duplicate; None if that row is being run now, so that it could not be counted.
    """

    state: str = ""
    earlier: Earlier | None = None


def store_incoming(alias: str, incoming: Sequence[Incoming], *, dead_blocks: bool) -> list[Taken]:
    """∅ → received, due now; ∅ → waiting, in order and behind another of its key; ∅ → dead if refused; ∅ → shed.

    For deliveries of one handler, in their order, inside a transaction of `ordering.deciding` or one like it. With
    `dead_blocks`, a refused one keeps its place until an operator decides; otherwise it has none.

    Raises:
        ConcurrentDuplicate: another transaction held a lock for longer than this one's lock_timeout. Roll back and try again.
    """
    if not incoming:
        return []
    handler = incoming[0].row.handler
    insertions = _insertions(incoming, dead_blocks=dead_blocks)
    with locked_means_busy:
        hold_gates(alias, handler, [given.row.key for given in incoming if given.in_order])
    stored = dict(insert_many(alias, insertions).rows)
    _record(alias, incoming, stored)
    taken = [_taken(alias, given, *stored.pop(given.row.biz_id, (0, ""))) for given in incoming]
    for key in _headless(insertions, taken):
        promote_next(alias, handler, key)
    return taken


def _insertions(incoming: Sequence[Incoming], *, dead_blocks: bool) -> list[Insertion]:
    seen: set[str] = set()
    insertions = []
    for given in incoming:
        key = given.row.key
        ordered = given.in_order and bool(key) and (dead_blocks or not given.refused)
        insertions.append(
            Insertion(
                row=given.row,
                state=_state(given, ordered=ordered),
                leads=key not in seen,
                due_after=None if given.refused or given.shed else 0.0,
                ordered=ordered,
                quarantined=given.quarantined,
                last_error=printable(given.refused or given.shed, ERROR_LENGTH),
                error_class=REFUSED if given.refused else "",
            )
        )
        if ordered:
            seen.add(key)
    return insertions


def _state(given: Incoming, *, ordered: bool) -> State:
    if given.refused:
        return State.DEAD
    if given.shed:
        return State.SHED
    return State.WAITING if ordered else State.RECEIVED


def _record(alias: str, incoming: Sequence[Incoming], stored: Mapping[str, tuple[int, str]]) -> None:
    """Deliveries that are not handled matter, each with its reason."""
    first: dict[str, Incoming] = {}
    for given in incoming:
        first.setdefault(given.row.biz_id, given)
    reasons: dict[str, list[int]] = {}
    for biz_id, (row, _) in stored.items():
        reasons.setdefault(first[biz_id].refused or first[biz_id].shed, []).append(row)
    for reason, rows in reasons.items():
        record(alias, rows, was="", reason=reason, matters=bool(reason))


def _taken(alias: str, given: Incoming, _row: int, state: str) -> Taken:
    # Of two copies in one batch, the first was inserted, and the second is its duplicate.
    return Taken(state) if state else Taken(earlier=count_duplicate(alias, given.row, redelivered=given.redelivered))


def _headless(insertions: Sequence[Insertion], taken: Sequence[Taken]) -> list[str]:
    """Keys whose first delivery here was a duplicate, so that the next one, stored as waiting, may be the head."""
    missing = {given.row.key for given, one in zip(insertions, taken, strict=True) if given.leads and not one.state}
    waiting = {given.row.key for given, one in zip(insertions, taken, strict=True) if one.state == State.WAITING}
    return sorted(missing & waiting)
