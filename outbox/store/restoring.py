"""Restore: make cancelled, expired, dead or retrying messages ready or scheduled again.

One statement moves the row and leaves its message id and position unchanged, so the message exists exactly once at any moment.
A second restore finds nothing to restore, and a restore that was killed is continued by repeating it.
"""

from collections.abc import Collection, Sequence

from django.db import OperationalError, transaction

from exactly_once.sql.faults import is_collision
from outbox.models import IS_AHEAD, OutboxMessage
from outbox.states import GIVEN_UP, RESTORE, State
from outbox.store.selecting import placed
from outbox.store.transitions import Moved, move
from outbox.store.unique import IS_REPLACED, take_names

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
    locked = list(locking.only("message_id", "topic", "biz_id", "is_unique", "state"))
    # It is asked of unique messages only, because it locks all of history.
    asked = any(row.is_unique for row in locked)
    replaced_before = {*rows.filter(IS_REPLACED).values_list("pk", flat=True)} if asked else set()
    chosen: list[OutboxMessage] = []
    left: dict[int, str] = {}
    for row in locked:
        if row.state not in states:
            left[row.pk] = row.state
        elif row.pk in replaced_before:
            left[row.pk] = REPLACED
        elif not row.ahead and not overdue:
            left[row.pk] = OVERDUE
        else:
            chosen.append(row)
    changed, replaced = _move_unless_replaced(alias, chosen, reason, may_wait=not skip_locked)
    return changed, left | dict.fromkeys(replaced, REPLACED)


def _move_unless_replaced(
    alias: str, rows: Sequence[OutboxMessage], reason: str, *, may_wait: bool
) -> tuple[list[Moved], list[int]]:
    """Restore messages unless a concurrent `publish(unique=True)` replaced them; those restored, and those replaced.

    If a transaction that is still open has taken one of their names, each half is tried separately.
    """
    try:
        with transaction.atomic(using=alias):
            unique = [row for row in rows if row.is_unique and row.state in GIVEN_UP]
            earlier = take_names(alias, unique)
            replaced = [row.pk for row in unique if (row.topic, row.biz_id) in earlier]
            left = [row.pk for row in rows if row.pk not in replaced]
            return move(alias, RESTORE, left, only={row.state for row in rows}, reason=reason), replaced
    except OperationalError as error:
        if may_wait or not is_collision(error):
            raise
    if len(rows) <= 1:
        return [], []
    middle = len(rows) // 2
    first, second = (_move_unless_replaced(alias, half, reason, may_wait=may_wait) for half in (rows[:middle], rows[middle:]))
    return first[0] + second[0], first[1] + second[1]
