"""Restore: make cancelled, expired, dead or retrying messages ready or scheduled again.

One statement moves the row and leaves its message id and position unchanged, so the message exists exactly once at any moment.
A second restore finds nothing to restore, and a restore that was killed is continued by repeating it.
"""

from collections.abc import Collection, Sequence

from django.db import IntegrityError, OperationalError, transaction

from exactly_once.sql.days import LIVE
from exactly_once.sql.faults import is_collision
from outbox.models import IS_AHEAD, OutboxMessage
from outbox.states import GIVEN_UP, RESTORE, State
from outbox.store.selecting import placed
from outbox.store.transitions import Moved, move
from outbox.store.unique import IS_REPLACED, require_unpublished

OVERDUE, REPLACED = "overdue", "replaced"


def restored_by_default(*, by_id: bool) -> Collection[str]:
    """The states to restore by default: those without an automatic next step, and with `by_id` retrying messages as well."""
    return RESTORE.sources if by_id else (State.CANCELLED, State.EXPIRED, State.DEAD)


def restore(
    alias: str, positions: Sequence[int], states: Collection[str], reason: str, *, overdue: bool, skip_locked: bool
) -> tuple[list[Moved], dict[int, str]]:
    """Make messages scheduled if their `deliver_at` is in the future, or ready otherwise; and why others were not restored.

    Their attempts are counted from 0 again. For a message that becomes ready, the time from its due time to its expiry starts
    again now. A header marks the messages as replayed by an operator, because an attempt may have reached the broker, whatever
    their state is.
    """
    rows = placed(alias, positions, unless=State.PUBLISHED)
    # A published message cannot be restored, and finding it by its position is slow. The rows are locked first, because the
    # statement that moves a row does not return its previous state.
    locking = rows.select_for_update(skip_locked=skip_locked).order_by("pk").annotate(ahead=IS_AHEAD)
    locked = list(locking.values_list("pk", "state", "ahead", "is_unique"))
    # It is asked of unique messages only, because it locks all of history.
    asked = any(is_unique for *_others, is_unique in locked)
    replaced_before = {*rows.filter(IS_REPLACED).values_list("pk", flat=True)} if asked else set()
    found: dict[str, list[int]] = {}
    left: dict[int, str] = {}
    for position, state, ahead, _is_unique in locked:
        if state not in states:
            left[position] = state
        elif position in replaced_before:
            left[position] = REPLACED
        elif not ahead and not overdue:
            left[position] = OVERDUE
        else:
            found.setdefault(state, []).append(position)
    changed: list[Moved] = []
    for state, group in found.items():
        moved, replaced = _move_unless_replaced(alias, group, State(state), reason, may_wait=not skip_locked)
        changed += moved
        left |= dict.fromkeys(replaced, REPLACED)
    return changed, left


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
            live = OutboxMessage.objects.using(alias).filter(day=LIVE, pk__in=[one.position for one in moved])
            if was in GIVEN_UP and (unique := list(live.filter(is_unique=True).values_list("pk", flat=True))):
                require_unpublished(alias, unique)
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
