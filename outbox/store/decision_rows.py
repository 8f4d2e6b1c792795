"""Decisions about messages, by business code, operators and checkers: one transition of rows that are named by position."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from django.db import DatabaseError, transaction
from django.utils.translation import gettext_noop

from exactly_once.sql.connections import lock_timeout
from exactly_once.sql.faults import SERIALIZATION_FAILURE, is_collision, sqlstate_of
from exactly_once.states import Transition
from outbox import doorbell
from outbox.states import PUBLISH_NOW, RESTORE
from outbox.store import restoring
from outbox.store.selecting import find
from outbox.store.transitions import Moved, move

_Result = TypeVar("_Result")
OPERATORS_WAIT = timedelta(seconds=10)
_A_MOMENT = timedelta(milliseconds=100)
LOCKED, DELETED = "locked", "deleted"
WHY = {
    LOCKED: "another transaction has locked it",
    DELETED: "it no longer exists",
    restoring.OVERDUE: gettext_noop("it is overdue, and overdue messages were not selected"),
    restoring.REPLACED: gettext_noop("it was published with unique=True, and so was a later message with its topic and biz-id"),
}


@dataclass(frozen=True)
class Decided:
    """What a decision has changed; true unless that is nothing.

    Attributes:
        became: the state of each changed message, by position.
        left: why each of the others is unchanged, by position: its state, or a key of `WHY`.
    """

    became: Mapping[int, str]
    left: Mapping[int, str]

    def __bool__(self) -> bool:
        return bool(self.became)


def decide(
    alias: str,
    transition: Transition,
    positions: Sequence[int],
    *,
    which: Mapping[str, Any] | None = None,
    sources: Collection[str] | None = None,
    reason: str = "",
    due: datetime | timedelta | None = None,
    overdue: bool = True,
) -> Decided:
    """Apply a transition to messages, and wake the relays once it is committed.

    A relay locks the rows that it has claimed until their outcome is stored, so a changed message is not sent. No relay claims
    the changed rows before the open transaction ends. Locked rows are waited for, and left after ten seconds. A message whose
    last outcome is unknown may already be in the broker, and cannot be removed from there.

    Args:
        positions: at most some hundreds, because they are locked until the transaction ends.
        which: indexed columns that identify these messages. History has no index of the positions of published messages.
        sources: restricts the source states.
        reason: for the trail: who decided. A new due time is appended.
        due: when the messages are to be published, for `RESCHEDULE`.
        overdue: whether `RESTORE` applies to messages whose delivery time has passed.
    """
    states = [state for state in transition.sources if sources is None or state in sources]
    given: dict[str, Any] = {} if due is None else {"due": due}
    if due is not None or transition is PUBLISH_NOW:
        reason = "; ".join(filter(None, (reason, _due_text(due))))

    def change(*, skip_locked: bool) -> tuple[Sequence[Moved], Mapping[int, str]]:
        left: Mapping[int, str] = {}
        with transaction.atomic(using=alias), lock_timeout(alias, _A_MOMENT if skip_locked else OPERATORS_WAIT):
            if transition is RESTORE:
                moved, left = restoring.restore(alias, positions, states, reason, overdue=overdue, skip_locked=skip_locked)
            else:
                moved = move(alias, transition, positions, only=states, reason=reason, skip_locked=skip_locked, **given)
            if moved:
                # Not only for those that are ready: later messages of its key may have waited for a cancelled one.
                doorbell.ring_if_soon(alias, due)
        return moved, left

    moved, left = _despite_locks(change)
    became = {one.position: one.became for one in moved}
    unchanged = set(positions) - became.keys() - left.keys()
    if unchanged:
        left = {**left, **_why_unchanged(alias, which or {"pk__in": positions}, unchanged, states)}
    return Decided(became, left)


def _despite_locks(change: Callable[..., _Result]) -> _Result | tuple[tuple[()], Mapping[int, str]]:
    """Call `change`. After a collision, such as a lock that is held for too long, call it again and leave locked rows out.

    A second serialization failure is raised: the snapshot of the open transaction does not have the present state of a row.
    """
    for skip_locked in (False, True):
        try:
            return change(skip_locked=skip_locked)
        except DatabaseError as error:
            if not is_collision(error) or (skip_locked and sqlstate_of(error) == SERIALIZATION_FAILURE):
                raise
    return (), {}


def _why_unchanged(
    alias: str, which: Mapping[str, Any], positions: Collection[int], sources: Collection[str]
) -> dict[int, str]:
    found = find(alias, which)
    if not set(positions) <= found.keys():
        found = find(alias, which, everywhere=True)  # some of them are history by now
    present = {position: found.get(position, DELETED) for position in positions}
    return {position: LOCKED if state in sources else state for position, state in present.items()}


def why(left: str) -> str:
    """A reason of `Decided.left` in words."""
    return WHY.get(left) or f"it is {left.replace('_', ' ')} now"


def _due_text(due: datetime | timedelta | None) -> str:
    if isinstance(due, datetime):
        return f"due {due.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"due in {due}" if due else "due now"
