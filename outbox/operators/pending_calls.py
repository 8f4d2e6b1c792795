"""What operators ask and decide about callbacks: those that are pending, and those that hang."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.db import transaction

from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.heartbeat_table import long_runs
from outbox.conf import outbox_options
from outbox.models import PendingCallback
from outbox.store.heartbeats import relays


def call_now(alias: str, pending: int) -> bool:
    """Make a callback due now. False: it does not exist any more, or is being called."""
    return _unless_in_hand(alias, pending, lambda row: row.update(available_at=DatabaseTime()))


def discard_call(alias: str, pending: int) -> bool:
    """Delete a pending callback. False: it does not exist any more, or is being called."""
    return _unless_in_hand(alias, pending, lambda row: row.delete()[0])


@dataclass
class Hanging:
    """Calls of one callback, or of the checker of one topic, that last longer than usual: the longest, and where they run."""

    lasts: timedelta = timedelta()
    processes: list[str] = field(default_factory=list)


def hanging(alias: str) -> dict[str, Hanging]:
    """By callback, or topic of a checker, the calls that have lasted longer than `STUCK_AFTER`, as the heartbeats say."""
    found: dict[str, Hanging] = {}
    for process in relays.rows(alias).filter(silent=False):
        for name, lasted in long_runs(process, outbox_options().STUCK_AFTER).items():
            if name:  # not a pass of the relay
                one = found.setdefault(name, Hanging())
                one.lasts = max(one.lasts, *lasted)
                one.processes.append(str(process))
    return found


def _unless_in_hand(alias: str, pending: int, write: Any) -> bool:
    with transaction.atomic(using=alias):
        row = PendingCallback.objects.using(alias).filter(pk=pending)
        return row.select_for_update(skip_locked=True).first() is not None and bool(write(row))
