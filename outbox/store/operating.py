"""What operators do and see: cancel, requeue, count, purge."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from django.db import OperationalError, connections, transaction
from django.db.models import Count, Min, Q
from django.db.models.expressions import RawSQL

from outbox.kernel.clock import DatabaseTime
from outbox.kernel.databases import lock_timeout
from outbox.kernel.envelope import BY_OPERATOR, REPLAY_HEADER
from outbox.kernel.faults import is_collision
from outbox.models import SETTLED, OutboxMessage, RelayLease, State
from outbox.store.dialect import LOCK_SPACE, TABLE, is_postgresql

_OPERATORS_WAIT = timedelta(seconds=10)

CANCELLABLE = (State.SCHEDULED, State.READY, State.RETRYING, State.WAITING, State.DEAD)
REQUEUEABLE = (State.DEAD, State.RETRYING)


def cancel(alias: str, position: int) -> bool:
    """scheduled | ready | retrying | waiting | dead → cancelled: no relay sends it any more.

    False: too late, or in a relay's hands. A message whose last outcome is unknown may be in the broker already; that is in
    nobody's power.
    """
    try:
        with transaction.atomic(using=alias), lock_timeout(alias, _OPERATORS_WAIT):
            if _in_hand(alias, position):
                return False
            cancellable = OutboxMessage.objects.using(alias).filter(pk=position, state__in=CANCELLABLE)
            return bool(cancellable.update(state=State.CANCELLED, settled_at=DatabaseTime()))
    except OperationalError as error:
        if is_collision(error):
            return False
        raise


def requeue(alias: str, position: int) -> bool:
    """dead | retrying → ready, with a full set of attempts. False: it is in neither of these states.

    From now on it says of itself that an operator had it sent again: an earlier attempt may have reached some consumers, whose
    inbox then tells this copy from one that a relay sent twice.
    """
    return bool(
        OutboxMessage.objects.using(alias)
        .filter(pk=position, state__in=REQUEUEABLE)
        .update(state=State.READY, attempts=0, available_at=DatabaseTime(), settled_at=None, headers=_marked_as_replayed(alias))
    )


def _marked_as_replayed(alias: str) -> RawSQL:
    # With the other headers, where publishers cannot set such a name: a column of its own would be read with every message.
    if is_postgresql(connections[alias]):
        return RawSQL("headers || jsonb_build_object(%s::text, %s::text)", [REPLAY_HEADER, BY_OPERATOR])
    return RawSQL("json_set(headers, %s, %s)", [f'$."{REPLAY_HEADER}"', BY_OPERATOR])


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

    Dead messages stay until a person has decided.
    """
    old = OutboxMessage.objects.using(alias).filter(state__in=SETTLED, settled_at__lt=DatabaseTime(-older_than))
    while ids := list(old.order_by("settled_at").values_list("pk", flat=True)[:chunk]):
        yield OutboxMessage.objects.using(alias).filter(pk__in=ids, state__in=SETTLED).delete()[0]


def purgeable(alias: str, older_than: timedelta) -> int:
    """How many rows `purge_settled` would delete."""
    return OutboxMessage.objects.using(alias).filter(state__in=SETTLED, settled_at__lt=DatabaseTime(-older_than)).count()
