"""What operators and the business decide about messages and see of them: cancel, reschedule, requeue, count, purge."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import OperationalError, connections, transaction
from django.db.models import (
    Case,
    Count,
    DateTimeField,
    Exists,
    ExpressionWrapper,
    F,
    Min,
    OuterRef,
    Q,
    QuerySet,
    Value,
    When,
)
from django.db.models.expressions import Combinable, RawSQL
from django.db.models.functions import Coalesce

from outbox.kernel.clock import DatabaseTime
from outbox.kernel.databases import lock_timeout
from outbox.kernel.envelope import BY_OPERATOR, REPLAY_HEADER
from outbox.kernel.faults import is_collision
from outbox.kernel.fields import FIRST_INSTANT, LAST_INSTANT
from outbox.models import SETTLED, OutboxMessage, PendingCallback, RelayLease, State
from outbox.store.dialect import LOCK_SPACE, TABLE, is_postgresql
from outbox.store.trail import note

OPERATORS_WAIT = timedelta(seconds=10)

CANCELLABLE = (State.SCHEDULED, State.READY, State.RETRYING, State.WAITING, State.DEAD)
_INSTANTS = (FIRST_INSTANT, LAST_INSTANT)
_HAS_INSTANTS = Q(expires_at__range=_INSTANTS, available_at__range=_INSTANTS, created_at__range=_INSTANTS) & (
    Q(deliver_at=None) | Q(deliver_at__range=_INSTANTS)
)
RESCHEDULABLE = (State.SCHEDULED, State.READY, State.RETRYING, State.WAITING)
REQUEUEABLE = (State.DEAD, State.RETRYING)


def cancel(alias: str, position: int, *, reason: str = "") -> bool:
    """scheduled | ready | retrying | waiting | dead → cancelled: no relay sends it any more.

    False: too late, or in a relay's hands. A message whose last outcome is unknown may be in the broker already; that is in
    nobody's power.

    Args:
        reason: for the trail: who did it.
    """
    return _decide(alias, position, CANCELLABLE, lambda _: {"state": State.CANCELLED, "settled_at": DatabaseTime()}, reason)


def reschedule(alias: str, position: int, due: datetime | timedelta, *, reason: str = "") -> bool:
    """scheduled | ready | retrying | waiting → scheduled for `due`, an instant or a span from now; a span of 0: → ready.

    Its attempts begin anew, and what time it had left from being due until it expires, it has again. False: see `cancel`.

    Args:
        reason: for the trail: who did it. When it is due is added.
    """

    def postponed(_: OutboxMessage) -> dict[str, Any]:
        return {
            "state": State.SCHEDULED if due else State.READY,
            "attempts": 0,
            "deliver_at": _instant(due),
            "available_at": _instant(due),
            "expires_at": as_long_from(_instant(due)),
        }

    return _decide(alias, position, RESCHEDULABLE, postponed, "; ".join(filter(None, (reason, _told(due)))))


def as_long_from(due: datetime | DatabaseTime) -> Combinable:
    """When a message expires that is due then, and is to last as long from then as it did from when it was due before.

    A restored one keeps its old `deliver_at`; what it lasts counts from when it became available.
    """
    was_restored = Q(headers__has_key=REPLAY_HEADER, expires_at__gt=F("available_at"))
    since = Case(When(was_restored, then=F("available_at")), default=Coalesce("deliver_at", "created_at"))
    instant = Value(due, output_field=DateTimeField()) if isinstance(due, datetime) else due
    again = ExpressionWrapper(instant + (F("expires_at") - since), output_field=DateTimeField())
    # With the instants of a row that was damaged by hand the database cannot calculate; they stay.
    return Case(When(_HAS_INSTANTS, then=again), default=F("expires_at"), output_field=DateTimeField())


def _instant(due: datetime | timedelta) -> datetime | DatabaseTime:
    return DatabaseTime(due) if isinstance(due, timedelta) else due


def _told(due: datetime | timedelta) -> str:
    if isinstance(due, datetime):
        return f"due {due.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"due in {due}" if due else "due now"


_Written = Callable[[OutboxMessage], dict[str, Any]]


def _decide(alias: str, position: int, states: Sequence[State], written: _Written, reason: str) -> bool:
    """Write a row that is in one of these states and in no relay's hands; False: it is not.

    What is not ready is in nobody's hands, and locking it is enough. For what is ready, a relay's pass over its shard is waited
    for, and the shard kept from relays until the open transaction ends.
    """
    resting = [state for state in states if state is not State.READY]
    try:
        with transaction.atomic(using=alias), lock_timeout(alias, OPERATORS_WAIT):
            before = transaction.savepoint(using=alias)
            if _write(alias, position, resting, written, reason):
                transaction.savepoint_commit(before, using=alias)
                return True
            # One that became ready while its lock was waited for is locked all the same: a relay that has the shard would wait
            # for the row, and this for the shard.
            transaction.savepoint_rollback(before, using=alias)
            return not _in_hand(alias, position) and _write(alias, position, states, written, reason)
    except OperationalError as error:
        if is_collision(error):
            return False
        raise


def _write(alias: str, position: int, states: Sequence[State], written: _Written, reason: str) -> bool:
    """Lock a row that is in one of these states, write it and leave a trail of it; False: it is not in any."""
    row = OutboxMessage.objects.using(alias).filter(pk=position, state__in=states)
    # Locked first: an UPDATE does not tell which of these states it was.
    locked = row.select_for_update().only("state").first()
    if locked is None:
        return False
    values = written(locked)
    row.update(**values)
    note(alias, [position], was=locked.state, became=values["state"], reason=reason)
    return True


def named(alias: str, topic: str, biz_id: str) -> list[int]:
    """The positions of the messages with this business name, in the order in which to lock them: by shard."""
    found = OutboxMessage.objects.using(alias).filter(topic=topic, biz_id=biz_id).order_by("shard", "pk")
    return list(found.values_list("pk", flat=True))


def topics(alias: str) -> list[str]:
    """The topics that there are messages of, each found in the index by the one before: a step for each, not for a message."""
    with connections[alias].cursor() as cursor:
        cursor.execute(
            f"WITH RECURSIVE topics(name) AS (SELECT (SELECT min(topic) FROM {TABLE}) UNION ALL "
            f"SELECT (SELECT min(m.topic) FROM {TABLE} m WHERE m.topic > topics.name) FROM topics WHERE name IS NOT NULL) "
            "SELECT name FROM topics WHERE name IS NOT NULL"
        )
        return [name for (name,) in cursor.fetchall()]


def identified(alias: str, message_id: uuid.UUID) -> list[int]:
    """The position of the message with this id, if there is one."""
    return list(OutboxMessage.objects.using(alias).filter(message_id=message_id).values_list("pk", flat=True))


def states_of(alias: str, positions: Sequence[int]) -> dict[int, str]:
    """The state each of them is in, by position, the latest message first."""
    found = OutboxMessage.objects.using(alias).filter(pk__in=positions).order_by("-pk")
    return dict(found.values_list("pk", "state"))


def requeue(alias: str, position: int, *, reason: str = "") -> bool:
    """dead | retrying → ready, with a full set of attempts. False: it is in neither of these states.

    From now on it says of itself that an operator had it sent again: an earlier attempt may have reached some consumers, whose
    inbox then tells this copy from one that a relay sent twice.

    Args:
        reason: for the trail: who did it.
    """
    anew = {"state": State.READY, "attempts": 0, "available_at": DatabaseTime(), "settled_at": None}
    marked = marked_as_replayed(alias)
    with transaction.atomic(using=alias):
        return _write(alias, position, REQUEUEABLE, lambda _: {**anew, "headers": marked}, reason)


def marked_as_replayed(alias: str) -> RawSQL:
    """The headers with the mark that somebody has had the message sent again."""
    # With the other headers, where publishers cannot set such a name: a column of its own would be read with every message.
    # Headers that are not an object were damaged by hand, and are left for a person to correct.
    if is_postgresql(connections[alias]):
        return RawSQL(
            "CASE jsonb_typeof(headers) WHEN 'object' THEN headers || jsonb_build_object(%s::text, %s::text) ELSE headers END",
            [REPLAY_HEADER, BY_OPERATOR],
        )
    return RawSQL(
        "CASE json_type(headers) WHEN 'object' THEN json_set(headers, %s, %s) ELSE headers END",
        [f'$."{REPLAY_HEADER}"', BY_OPERATOR],
    )


def _in_hand(alias: str, position: int) -> bool:
    """Does a relay have this row right now? If not, none will take it until the open transaction ends."""
    connection = connections[alias]
    if is_postgresql(connection):
        # A waiting lock request makes every later try-lock fail, so even a busy relay lets us in after its pass.
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT pg_advisory_xact_lock({LOCK_SPACE}, shard) FROM {TABLE} WHERE id = %s", [position])
        return False
    lease = RelayLease.objects.using(alias).filter(expires_at__gt=DatabaseTime()).first()
    return lease is not None and position in lease.in_hand


def states(alias: str) -> dict[str, int]:
    """How many rows are in each state; every state is named."""
    counted = dict(OutboxMessage.objects.using(alias).values_list("state").annotate(Count("id")).order_by())
    return {state.value: counted.get(state, 0) for state in State}


def oldest_waiting(alias: str) -> datetime | None:
    """The due time of the message that has waited longest past it, or None when none waits."""
    waiting = OutboxMessage.objects.using(alias).filter(
        Q(state__in=[State.READY, State.WAITING])
        | Q(state__in=[State.SCHEDULED, State.RETRYING], available_at__lte=DatabaseTime())
    )
    oldest: datetime | None = waiting.aggregate(oldest=Min("available_at"))["oldest"]
    return oldest


def purge_settled(alias: str, older_than: timedelta, *, chunk: int = 1000) -> Iterator[int]:
    """Delete settled rows older than `older_than`, in small transactions; yields how many went with each.

    Dead messages stay until a person has decided, and those of which a callback is still to be told until it has been.
    """
    while ids := list(_old(alias, older_than).order_by("settled_at").values_list("pk", flat=True)[:chunk]):
        # Asked once more: one that was restored meanwhile may be settled anew, with a callback that is still to be told.
        yield _old(alias, older_than).filter(pk__in=ids).delete()[0]


def purgeable(alias: str, older_than: timedelta) -> int:
    """How many rows `purge_settled` would delete."""
    return _old(alias, older_than).count()


def _old(alias: str, older_than: timedelta) -> QuerySet[OutboxMessage]:
    settled = OutboxMessage.objects.using(alias).filter(state__in=SETTLED, settled_at__lt=DatabaseTime(-older_than))
    return settled.exclude(Exists(PendingCallback.objects.filter(message=OuterRef("pk"))))
