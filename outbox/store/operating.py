"""The decisions of operators and of business code about messages; and finding messages by name."""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from django.db import OperationalError, connections, transaction

from exactly_once.sql.connections import lock_timeout
from exactly_once.sql.days import LIVE
from exactly_once.sql.faults import is_collision
from exactly_once.states import Transition
from outbox.models import OutboxMessage
from outbox.states import PUBLISH_NOW
from outbox.store.claiming import claims_by_locks
from outbox.store.dialect import TABLE, each_topic
from outbox.store.lease import in_hand
from outbox.store.transitions import move

_Result = TypeVar("_Result")

OPERATORS_WAIT = timedelta(seconds=10)
_A_MOMENT = timedelta(milliseconds=100)


def decide(
    alias: str,
    transition: Transition,
    positions: Sequence[int],
    *,
    sources: Collection[str] | None = None,
    reason: str = "",
    due: datetime | timedelta | None = None,
) -> set[int]:
    """Apply a transition to messages; returns those that it changed. The others are in another state, or locked for too long.

    A relay locks the rows that it has claimed until their outcome is stored, so a changed message is not sent. No relay claims
    the changed rows before the open transaction ends. A message whose last outcome is unknown may already be in the broker, and
    cannot be removed from there.

    Args:
        sources: restricts the source states.
        reason: for the trail: who decided. A new due time is appended.
        due: when the messages are to be published, for `RESCHEDULE`.
    """
    given: dict[str, Any] = {} if due is None else {"due": due}
    if due is not None or transition is PUBLISH_NOW:
        reason = "; ".join(filter(None, (reason, _due_text(due))))

    def change(*, skip_locked: bool = False) -> set[int]:
        # On SQLite a relay is not in a transaction while it sends. Waiting for it would make the only writer wait for itself.
        claimed = frozenset() if claims_by_locks(alias) else in_hand(alias)
        rows = [position for position in positions if position not in claimed]
        moved = move(alias, transition, rows, only=sources, reason=reason, skip_locked=skip_locked, **given)
        return {one.position for one in moved}

    try:
        return waiting_for_locks(alias, change)
    except OperationalError as error:
        if is_collision(error):
            return set()
        raise


def _due_text(due: datetime | timedelta | None) -> str:
    if isinstance(due, datetime):
        return f"due {due.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"due in {due}" if due else "due now"


def waiting_for_locks(alias: str, change: Callable[..., _Result]) -> _Result:
    """Call `change`. If that waits for a lock for too long, call it again with `skip_locked=True`, to leave locked rows out."""
    try:
        with transaction.atomic(using=alias), lock_timeout(alias, OPERATORS_WAIT):
            return change()
    except OperationalError as error:
        if not is_collision(error):
            raise
    with transaction.atomic(using=alias), lock_timeout(alias, _A_MOMENT):
        return change(skip_locked=True)


def find(alias: str, name: Mapping[str, Any], *, everywhere: bool = False) -> dict[int, str]:
    """Position and state of the messages that have these values in their columns, the oldest first.

    History is searched only if no live message is found, or with `everywhere`: reading it locks it until the transaction ends.
    """
    chosen = OutboxMessage.objects.using(alias).filter(**name).order_by("pk").values_list("pk", "state")
    return (not everywhere and dict(chosen.filter(day=LIVE))) or dict(chosen)


def topics(alias: str, most: int = 10_000) -> list[str]:
    """The topics of all messages, up to a limit, in their order."""
    with connections[alias].cursor() as cursor:
        cursor.execute(f"{each_topic(f'{TABLE} m WHERE true')} LIMIT %s", [most])
        return [name for (name,) in cursor.fetchall()]
