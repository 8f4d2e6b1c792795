"""What operators and the business decide about messages and see of them: cancel, reschedule, count, purge."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from django.db import OperationalError, connections, transaction
from django.db.models import QuerySet

from outbox.database.connections import is_postgresql, lock_timeout
from outbox.database.faults import is_collision
from outbox.database.now import DatabaseTime
from outbox.models import OutboxMessage, RelayLease
from outbox.states import CANCEL, LIVE, PUBLISH_NOW, RESCHEDULE, State, Transition
from outbox.store.dialect import LIVE_PART, LOCK_SPACE, TABLE, each_topic
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


def named(alias: str, topic: str, biz_id: str, *, everywhere: bool = False) -> dict[int, str]:
    """Position and state of the messages with this business name, in the order in which to lock them: by shard.

    Of what is settled only if nothing is live, or `everywhere`: who reads history locks it until the transaction ends.
    """
    return _found(OutboxMessage.objects.using(alias).filter(topic=topic, biz_id=biz_id), everywhere=everywhere)


def identified(alias: str, message_id: uuid.UUID, *, everywhere: bool = False) -> dict[int, str]:
    """Position and state of the message with this id, if there is one; as `named`."""
    return _found(OutboxMessage.objects.using(alias).filter(message_id=message_id), everywhere=everywhere)


def _found(messages: QuerySet[OutboxMessage], *, everywhere: bool) -> dict[int, str]:
    chosen = messages.order_by("shard", "pk").values_list("pk", "state")
    return (not everywhere and dict(chosen.filter(day=LIVE))) or dict(chosen)


def topics(alias: str) -> list[str]:
    """The topics that there are messages of."""
    with connections[alias].cursor() as cursor:
        cursor.execute(each_topic(f"{TABLE} m WHERE true"))
        return [name for (name,) in cursor.fetchall()]


def _in_hand(alias: str, position: int) -> bool:
    """Does a relay have this row right now? If not, none will take it until the open transaction ends."""
    connection = connections[alias]
    if is_postgresql(connection):
        # A waiting lock request makes every later try-lock fail, so even a busy relay lets us in after its pass.
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT pg_advisory_xact_lock({LOCK_SPACE}, shard) FROM {LIVE_PART} WHERE id = %s", [position])
        return False
    lease = RelayLease.objects.using(alias).filter(expires_at__gt=DatabaseTime()).first()
    return lease is not None and position in lease.in_hand
