"""What operators and the business decide about messages and see of them: cancel, reschedule, count, purge."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from django.db import OperationalError, connections, transaction
from django.db.models import Count, Exists, Min, OuterRef, Q, QuerySet

from outbox.database.connections import is_postgresql, lock_timeout
from outbox.database.faults import is_collision
from outbox.database.now import DatabaseTime
from outbox.models import OutboxMessage, PendingCallback, RelayLease
from outbox.states import CANCEL, PUBLISH_NOW, RESCHEDULE, SETTLED, State, Transition
from outbox.store.dialect import LOCK_SPACE, TABLE
from outbox.store.transitions import move

OPERATORS_WAIT = timedelta(seconds=10)


def cancel(alias: str, position: int, *, reason: str = "") -> bool:
    """No relay sends it any more. False: too late, or in a relay's hands.

    A message whose last outcome is unknown may be in the broker already; nothing can call it back from there.

    Args:
        reason: for the trail: who did it.
    """
    return _decide(alias, CANCEL, position, reason)


def reschedule(alias: str, position: int, due: datetime | timedelta, *, reason: str = "") -> bool:
    """Have it published at an instant, or so long from now; 0: now. False: see `cancel`.

    Its attempts begin anew, and what time it had left from being due until it expires, it has again.

    Args:
        reason: for the trail: who did it. When it is due is added.
    """
    reason = "; ".join(filter(None, (reason, _told(due))))
    return _decide(alias, RESCHEDULE, position, reason, due=due) if due else _decide(alias, PUBLISH_NOW, position, reason)


def _told(due: datetime | timedelta) -> str:
    if isinstance(due, datetime):
        return f"due {due.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"due in {due}" if due else "due now"


def _decide(alias: str, transition: Transition, position: int, reason: str, **given: Any) -> bool:
    """Move a message that is in no relay's hands; False: it is, or in no state that the transition leads from.

    What is not ready is in no relay's hands, and locking it is enough. For what is ready, a relay's pass over its shard is
    waited for, and the shard kept from relays until the open transaction ends.
    """
    decide = partial(move, alias, transition, [position], reason=reason, **given)
    not_ready = [state for state in transition.sources if state is not State.READY]
    try:
        with transaction.atomic(using=alias), lock_timeout(alias, OPERATORS_WAIT):
            before = transaction.savepoint(using=alias)
            if decide(only=not_ready):
                transaction.savepoint_commit(before, using=alias)
                return True
            # One that became ready while its lock was waited for is locked all the same: a relay that has the shard would wait
            # for the row, and this for the shard.
            transaction.savepoint_rollback(before, using=alias)
            return not _in_hand(alias, position) and bool(decide())
    except OperationalError as error:
        if is_collision(error):
            return False
        raise


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
