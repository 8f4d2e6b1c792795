"""Restore: make cancelled, expired, dead or retrying messages ready or scheduled again.

One statement moves the row and leaves its message id and position unchanged, so the message exists exactly once at any moment.
A second restore finds nothing to restore, and a restore that was killed is continued by repeating it.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from django.db import IntegrityError, OperationalError, transaction

from exactly_once.sql.faults import is_collision
from outbox.models import IS_AHEAD, OutboxMessage
from outbox.states import GIVEN_UP, RESTORE, State
from outbox.store.operating import waiting_for_locks
from outbox.store.transitions import Moved, move
from outbox.store.unique import IS_REPLACED, require_unpublished

_ENDED = (State.CANCELLED, State.EXPIRED, State.DEAD)
OVERDUE, LOCKED, REPLACED = "overdue", "locked", "replaced"


def restored_by_default(*, by_id: bool) -> Collection[str]:
    """The states to restore by default: those without an automatic next step, and with `by_id` retrying messages as well."""
    return RESTORE.sources if by_id else _ENDED


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The result of a restore.

    Attributes:
        ready, scheduled: the number of messages in this state now.
        left: the number of unchanged messages by reason: a state from which they are not restored; "overdue", if these were
            excluded; "replaced", if another unique message was published instead; "locked", if another transaction has locked
            or deleted the message.
        unchanged: the reason of each of these, by position.
    """

    ready: int = 0
    scheduled: int = 0
    unchanged: Mapping[int, str]

    @property
    def left(self) -> Mapping[str, int]:
        return Counter(self.unchanged.values())


def restore(alias: str, position: int, *, overdue: bool = True, reason: str = "") -> bool:
    """`restore_some` of one message, from each state that can be restored. False: it is unchanged."""
    restored = restore_some(alias, [position], states=RESTORE.sources, overdue=overdue, reason=reason)
    return bool(restored.ready + restored.scheduled)


def restore_some(
    alias: str,
    positions: Sequence[int],
    *,
    states: Collection[str] = _ENDED,
    overdue: bool = True,
    reason: str = "",
) -> Restored:
    """Make messages scheduled if their `deliver_at` is in the future, or ready otherwise.

    Their attempts are counted from 0 again. For a message that becomes ready, the time from its due time to its expiry starts
    again now. A header marks the messages as replayed by an operator, because an attempt may have reached the broker, whatever
    their state is.

    Args:
        positions: at most some hundreds, because they are locked until the transaction ends.
        states: restore only from these.
        overdue: whether to restore messages whose delivery time has passed.
        reason: for the trail: who decided.
    """

    def change(*, skip_locked: bool = False) -> Restored:
        return _restored(alias, positions, states, reason, overdue=overdue, skip_locked=skip_locked)

    # Another transaction may have locked one of the rows, or its unique topic and biz-id, for long. Only that row is left.
    return waiting_for_locks(alias, change)


def _restored(
    alias: str, positions: Sequence[int], states: Collection[str], reason: str, *, overdue: bool, skip_locked: bool
) -> Restored:
    rows = OutboxMessage.objects.using(alias).filter(pk__in=positions)
    # A published message cannot be restored, and finding it by its position is slow. The rows are locked first, because the
    # statement that moves a row does not return its previous state.
    locked = rows.exclude(state=State.PUBLISHED).select_for_update(skip_locked=skip_locked).order_by("pk")
    locked = locked.annotate(ahead=IS_AHEAD, replaced=IS_REPLACED)
    found: dict[str, list[int]] = {}
    became: Counter[str] = Counter()
    left: dict[int, str] = {}
    for position, state, ahead, replaced in locked.values_list("pk", "state", "ahead", "replaced"):
        if state not in states:
            left[position] = state
        elif replaced:
            left[position] = REPLACED
        elif not ahead and not overdue:
            left[position] = OVERDUE
        else:
            found.setdefault(state, []).append(position)
    changed: set[int] = set()
    for state, group in found.items():
        moved, replaced = _move_unless_replaced(alias, group, State(state), reason, may_wait=not skip_locked)
        became.update(one.became for one in moved)
        changed.update(one.position for one in moved)
        left |= dict.fromkeys(replaced, REPLACED)
    if missing := set(positions) - changed - set(left):
        published = set(rows.filter(state=State.PUBLISHED).values_list("pk", flat=True)) & missing
        left |= {position: State.PUBLISHED.value if position in published else LOCKED for position in missing}
    return Restored(ready=became[State.READY], scheduled=became[State.SCHEDULED], unchanged=left)


def _move_unless_replaced(
    alias: str, positions: Sequence[int], was: State, reason: str, *, may_wait: bool
) -> tuple[list[Moved], list[int]]:
    """Restore messages unless a concurrent `publish(unique=True)` replaced them; those restored, and those replaced.

    Only the unique index detects that; then each half is tried separately. The others are locked by such a transaction that
    is still open.
    """
    replaced: list[int] = []
    try:
        with transaction.atomic(using=alias):
            moved = move(alias, RESTORE, positions, only=[was], reason=reason)
            if was in GIVEN_UP:
                require_unpublished(alias, [one.position for one in moved])
            return moved, []
    except IntegrityError:
        replaced = [*positions]
    except OperationalError as error:
        if may_wait or not is_collision(error):
            raise
    if len(positions) == 1:
        return [], replaced
    middle = len(positions) // 2
    first, second = (
        _move_unless_replaced(alias, half, was, reason, may_wait=may_wait) for half in (positions[:middle], positions[middle:])
    )
    return first[0] + second[0], first[1] + second[1]
