"""The decisions of operators and of business code about messages: cancel and reschedule; and finding messages by name."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from django.db import OperationalError, connections, transaction
from django.db.models import QuerySet

from exactly_once.sql.connections import is_postgresql, lock_timeout
from exactly_once.sql.faults import is_collision
from outbox.models import OutboxMessage
from outbox.states import CANCEL, LIVE, PUBLISH_NOW, RESCHEDULE, State, Transition
from outbox.store.dialect import LIVE_PART, LOCK_SPACE, TABLE, each_topic
from outbox.store.lease import in_hand
from outbox.store.transitions import move

OPERATORS_WAIT = timedelta(seconds=10)


def cancel(alias: str, position: int, *, reason: str = "") -> bool:
    """Cancel a message, so that no relay sends it any more. False: it is too late, or a relay has claimed it.

    A message whose last outcome is unknown may already be in the broker, and cannot be removed from there.

    Args:
        reason: for the trail: who decided.
    """
    return _decide(alias, CANCEL, position, reason)


def reschedule(alias: str, position: int, due: datetime | timedelta, *, reason: str = "") -> bool:
    """Change when a message is published: an instant, or a duration from now; 0 means now. False: see `cancel`.

    Its attempts are counted from 0 again. The time from its due time to its expiry stays the same.

    Args:
        reason: for the trail: who decided. The new due time is appended.
    """
    reason = "; ".join(filter(None, (reason, _due_text(due))))
    return _decide(alias, RESCHEDULE, position, reason, due=due) if due else _decide(alias, PUBLISH_NOW, position, reason)


def _due_text(due: datetime | timedelta) -> str:
    if isinstance(due, datetime):
        return f"due {due.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"due in {due}" if due else "due now"


def _decide(alias: str, transition: Transition, position: int, reason: str, **given: Any) -> bool:
    """Apply a transition to a message that no relay has claimed. False: one has, or the message is in another state.

    No relay can have claimed a message that is not ready, so locking its row is sufficient. If it is ready, this waits for the
    relay's pass over its shard, and locks the shard until the open transaction ends.
    """
    decide = partial(move, alias, transition, [position], reason=reason, **given)
    not_ready = [state for state in transition.sources if state is not State.READY]
    try:
        with transaction.atomic(using=alias), lock_timeout(alias, OPERATORS_WAIT):
            with transaction.atomic(using=alias):
                if decide(only=not_ready):
                    return True
                # Unlock a row that became ready while this waited for its lock: else a relay that has the shard waits for the
                # row, and this transaction for the shard.
                transaction.set_rollback(True, using=alias)
            return not _in_hand(alias, position) and bool(decide())
    except OperationalError as error:
        if is_collision(error):
            return False
        raise


def named(alias: str, topic: str, biz_id: str, *, everywhere: bool = False) -> dict[int, str]:
    """Position and state of the messages with this topic and biz-id, in the order in which to lock them: by shard.

    History is searched only if no live message is found, or with `everywhere`: reading it locks it until the transaction ends.
    """
    return _found(OutboxMessage.objects.using(alias).filter(topic=topic, biz_id=biz_id), everywhere=everywhere)


def identified(alias: str, message_id: uuid.UUID, *, everywhere: bool = False) -> dict[int, str]:
    """Position and state of the message with this id, if there is one; as `named`."""
    return _found(OutboxMessage.objects.using(alias).filter(message_id=message_id), everywhere=everywhere)


def _found(messages: QuerySet[OutboxMessage], *, everywhere: bool) -> dict[int, str]:
    chosen = messages.order_by("shard", "pk").values_list("pk", "state")
    return (not everywhere and dict(chosen.filter(day=LIVE))) or dict(chosen)


def topics(alias: str, most: int = 10_000) -> list[str]:
    """The topics of all messages, up to a limit, in their order."""
    with connections[alias].cursor() as cursor:
        cursor.execute(f"{each_topic(f'{TABLE} m WHERE true')} LIMIT %s", [most])
        return [name for (name,) in cursor.fetchall()]


def _in_hand(alias: str, position: int) -> bool:
    """Has a relay claimed this row? If not, no relay claims it until the open transaction ends."""
    connection = connections[alias]
    if is_postgresql(connection):
        # A waiting lock request makes every later try-lock fail, so even a relay with a backlog lets this in after its pass.
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT pg_advisory_xact_lock({LOCK_SPACE}, shard) FROM {LIVE_PART} WHERE id = %s", [position])
        return False
    return position in in_hand(alias)
