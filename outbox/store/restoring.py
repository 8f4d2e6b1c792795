"""Bringing messages back that were cancelled, have expired or are dead.

It is one statement that moves the row: the same message id and position, so there is no moment at which a message is twice or
nowhere. Who restores twice finds nothing to restore the second time, and who is killed half-way goes on by
restoring again.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db import IntegrityError, OperationalError, transaction
from django.db.models import Count, Min, QuerySet

from outbox.database.connections import lock_timeout
from outbox.database.faults import is_collision
from outbox.expressions import IS_AHEAD
from outbox.models import OutboxMessage
from outbox.states import GIVEN_UP, RESTORE, State
from outbox.store.operating import OPERATORS_WAIT
from outbox.store.transitions import Moved, move
from outbox.store.unique import IS_REPLACED, require_unpublished

_ENDED = (State.CANCELLED, State.EXPIRED, State.DEAD)
OVERDUE, LOCKED, REPLACED = "overdue", "locked", "replaced"

_A_MOMENT = timedelta(milliseconds=100)


def restored_by_default(*, by_id: bool) -> Collection[State]:
    """What is restored when no states are given: what does not go on by itself, and retrying messages that are named by id."""
    return RESTORE.sources if by_id else _ENDED


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which messages are to be restored, of those in one of the `states`. What is not given does not matter.

    Attributes:
        since, until: of the instant at which they were cancelled, expired or died; `until` is not among them.
    """

    positions: Collection[int] | None = None
    message_ids: Collection[uuid.UUID] | None = None
    topic: str | None = None
    biz_id: str | None = None
    states: Collection[str] = _ENDED
    since: datetime | None = None
    until: datetime | None = None


class Restorable(NamedTuple):
    """What a preview tells of one topic and state.

    Attributes:
        messages: how many.
        overdue: of these, those that were due before now: restored, they go out at once.
        oldest: when the first of them was cancelled, expired or died.
    """

    topic: str
    state: str
    messages: int
    overdue: int
    oldest: datetime | None


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What became of some messages.

    Attributes:
        ready, scheduled: how many of them are so now.
        left: how many were left as they are, by reason: the state in which they cannot be restored; "overdue", when those were
            not wanted; "locked", when somebody else is changing the message at this moment, or has deleted it.
    """

    ready: int = 0
    scheduled: int = 0
    left: Mapping[str, int]


def preview_restoring(alias: str, selection: Selection) -> list[Restorable]:
    """What would be restored, by topic and state. Nothing is locked, so it is what it was a moment ago."""
    groups = _chosen(alias, selection).exclude(IS_REPLACED).order_by("topic", "state").values_list("topic", "state")
    return [
        Restorable(topic, state, count, count - ahead, oldest)
        for topic, state, count, ahead, oldest in groups.annotate(
            Count("id"), ahead=Count("id", filter=IS_AHEAD), oldest=Min("settled_at")
        )
    ]


def restorable(alias: str, selection: Selection) -> dict[int, uuid.UUID]:
    """The messages to restore: position and message id, the oldest first."""
    return dict(_chosen(alias, selection).order_by("pk").values_list("pk", "message_id"))


def restore(alias: str, position: int, *, overdue: bool = True, reason: str = "") -> bool:
    """`restore_some` of one, from whatever state that is possible. False: it was left as it is."""
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
    """Schedule them again while their `deliver_at` is ahead, or make them ready.

    With a full set of attempts. One that becomes ready lasts as long again, until it expires, as it did from being due. From
    now on it says of itself that it is sent again on purpose: an attempt may have reached the broker, whatever its state is.

    Args:
        positions: at most some hundreds, because they are locked until the transaction ends.
        states: of these only.
        overdue: also those whose time has passed. Without it they are left.
        reason: for the trail: who did it.
    """
    some = _Some(alias, positions, states, overdue, reason)
    try:
        with transaction.atomic(using=alias), lock_timeout(alias, OPERATORS_WAIT):
            return some.restored()
    except OperationalError as error:
        if not is_collision(error):
            raise
    # Another transaction has one of these rows locked for long, or the name of one. It alone is left.
    with transaction.atomic(using=alias), lock_timeout(alias, _A_MOMENT):
        return some.restored(skip_locked=True)


class _Some(NamedTuple):
    alias: str
    positions: Sequence[int]
    states: Collection[str]
    overdue: bool
    reason: str

    def restored(self, *, skip_locked: bool = False) -> Restored:
        rows = OutboxMessage.objects.using(self.alias).filter(pk__in=self.positions)
        # What is published cannot be restored, and is not found by its position fast. Locked first: what moves a row does not
        # tell which of these states it was in.
        locked = rows.exclude(state=State.PUBLISHED).select_for_update(skip_locked=skip_locked).order_by("pk")
        locked = locked.annotate(ahead=IS_AHEAD, replaced=IS_REPLACED)
        found: dict[str, list[int]] = {}
        became: Counter[str] = Counter()
        left: Counter[str] = Counter()
        for position, state, ahead, replaced in locked.values_list("pk", "state", "ahead", "replaced"):
            if state not in self.states:
                left[state] += 1
            elif replaced:
                left[REPLACED] += 1
            elif not ahead and not self.overdue:
                left[OVERDUE] += 1
            else:
                found.setdefault(state, []).append(position)
        for state, group in found.items():
            moved, replaced = self._move_unless_replaced(group, State(state), may_wait=not skip_locked)
            became.update(one.became for one in moved)
            left[REPLACED] += replaced
        if len(set(self.positions)) > became.total() + left.total():
            left[State.PUBLISHED] += rows.filter(state=State.PUBLISHED).count()
            left[LOCKED] = len(set(self.positions)) - became.total() - left.total()
        return Restored(ready=became[State.READY], scheduled=became[State.SCHEDULED], left=dict(+left))

    def _move_unless_replaced(self, positions: Sequence[int], was: State, *, may_wait: bool) -> tuple[list[Moved], int]:
        """Those that were restored, and how many have been replaced by a concurrent `publish(unique=True)`: only the index sees
        that. Each half is tried by itself then. What is neither is locked by such a transaction, which is still open."""
        replaced = 0
        try:
            with transaction.atomic(using=self.alias):
                moved = move(self.alias, RESTORE, positions, only=[was], reason=self.reason)
                if was in GIVEN_UP:
                    require_unpublished(self.alias, [one.position for one in moved])
                return moved, 0
        except IntegrityError:
            replaced = len(positions)
        except OperationalError as error:
            if may_wait or not is_collision(error):
                raise
        if len(positions) == 1:
            return [], replaced
        middle = len(positions) // 2
        first, replaced_first = self._move_unless_replaced(positions[:middle], was, may_wait=may_wait)
        second, replaced_second = self._move_unless_replaced(positions[middle:], was, may_wait=may_wait)
        return first + second, replaced_first + replaced_second


def _chosen(alias: str, selection: Selection) -> QuerySet[OutboxMessage]:
    wanted = {
        "pk__in": selection.positions,
        "message_id__in": selection.message_ids,
        "topic": selection.topic,
        "biz_id": selection.biz_id,
        "settled_at__gte": selection.since,
        "settled_at__lt": selection.until,
    }
    given = {field: value for field, value in wanted.items() if value is not None}
    return OutboxMessage.objects.using(alias).filter(state__in=selection.states, **given)
