"""Storing deliveries that are not handled now, in their order, many with one statement."""

from collections.abc import Sequence

from inbox.states import State
from inbox.store.arrivals import Insertion, insert_many
from inbox.store.dialect import locked_means_busy
from inbox.store.duplicates import count_duplicate
from inbox.store.message_rows import Earlier
from inbox.store.ordering import hold_gates, promote_next

Admitted = State | Earlier | None
"""The state that a delivery was stored in, or the row that it is a duplicate of. None: that row is being run, so that the
duplicate could not be counted."""


def admit(alias: str, insertions: Sequence[Insertion]) -> list[Admitted]:
    """∅ → received, due now; ∅ → waiting, in order and behind another of its key; ∅ → dead if refused; ∅ → shed.

    For deliveries of one handler, in their order, inside a transaction of `ordering.deciding` or one like it.

    Raises:
        ConcurrentDuplicate: another transaction held a lock for longer than this one's lock_timeout. Roll back and try again.
    """
    if not insertions:
        return []
    handler, insertions = insertions[0].row.handler, _with_leaders(insertions)
    with locked_means_busy:
        hold_gates(alias, handler, [insertion.row.key for insertion in insertions if insertion.values.get("ordered")])
    inserted, _ = insert_many(alias, insertions)
    admitted: list[Admitted] = []
    for index, insertion in enumerate(insertions):
        # Of two copies in one load, the first was inserted, and the second is its duplicate.
        _, state = inserted.get(index, (0, ""))
        admitted.append(State(state) if state else count_duplicate(alias, insertion.row))
    for key in _headless(insertions, admitted):
        promote_next(alias, handler, key)
    return admitted


def _with_leaders(insertions: Sequence[Insertion]) -> Sequence[Insertion]:
    """The first of each ordering key leads its load."""
    if not any(insertion.values.get("ordered") for insertion in insertions):
        return insertions
    seen: set[str] = set()
    leading: list[Insertion] = []
    for row, state, values in insertions:
        leading.append(Insertion(row, state, {**values, "leads": row.key not in seen}))
        if values.get("ordered"):
            seen.add(row.key)
    return leading


def _headless(insertions: Sequence[Insertion], admitted: Sequence[Admitted]) -> list[str]:
    """Keys whose first delivery here was a duplicate, so that the next one, stored as waiting, may be the head."""
    became = list(zip(insertions, admitted, strict=True))
    missing = {given.row.key for given, one in became if given.values.get("leads") and not isinstance(one, State)}
    return sorted(missing & {given.row.key for given, one in became if one is State.WAITING})
