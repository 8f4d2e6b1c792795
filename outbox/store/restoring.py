"""Bringing messages back that were cancelled, have expired or are dead.

It is an UPDATE in place: the same row, message id and position, and nothing is copied, so there is no moment at which a message
is twice or nowhere. Who restores twice finds nothing to restore the second time, and who is killed half-way goes on by
restoring again.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from django.db import OperationalError, transaction
from django.db.models import Count, Min, QuerySet

from outbox.expressions import IS_AHEAD
from outbox.kernel.databases import lock_timeout
from outbox.kernel.faults import is_collision
from outbox.models import OutboxMessage
from outbox.states import RESTORE, State
from outbox.store.operating import OPERATORS_WAIT
from outbox.store.transitions import move

RESTORED_BY_DEFAULT = (State.CANCELLED, State.EXPIRED, State.DEAD)
"""What is restored of a topic when no states are given: what does not go on by itself."""
OVERDUE, LOCKED = "overdue", "locked"


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
    states: Collection[str] = RESTORED_BY_DEFAULT
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
    groups = _chosen(alias, selection).order_by("topic", "state").values_list("topic", "state")
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
    states: Collection[str] = RESTORED_BY_DEFAULT,
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
    # Somebody has one of these rows locked for long. It alone is left.
    with transaction.atomic(using=alias):
        return some.restored(skip_locked=True)


class _Some(NamedTuple):
    alias: str
    positions: Sequence[int]
    states: Collection[str]
    overdue: bool
    reason: str

    def restored(self, *, skip_locked: bool = False) -> Restored:
        rows = OutboxMessage.objects.using(self.alias).filter(pk__in=self.positions)
        # Locked first: an UPDATE does not tell which of these states it was.
        locked = rows.select_for_update(no_key=True, skip_locked=skip_locked).order_by("pk").annotate(ahead=IS_AHEAD)
        found: dict[tuple[str, bool], list[int]] = {}
        for position, state, ahead in locked.values_list("pk", "state", "ahead"):
            found.setdefault((state, bool(ahead)), []).append(position)
        became: Counter[str] = Counter()
        left: Counter[str] = Counter()
        for (state, ahead), group in found.items():
            if state not in self.states:
                left[state] += len(group)
            elif not ahead and not self.overdue:
                left[OVERDUE] += len(group)
            else:
                moved = move(self.alias, RESTORE, group, only=[State(state)], reason=self.reason)
                became.update(one.became for one in moved)
        if lost := len(set(self.positions)) - became.total() - left.total():
            left[LOCKED] = lost
        return Restored(ready=became[State.READY], scheduled=became[State.SCHEDULED], left=dict(left))


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
