"""Publish the ticks that are due, beside the relay.

A tick is one transaction: it locks the row of the schedule, calls the function, writes its message, and moves the position to
the tick. If it does not commit, another relay repeats it; once it has committed, no relay does. A relay skips schedules whose
row another one has locked. The database's clock decides what is due: if it is set back, the ticks up to the position remain
published.

A function that raises delays its own schedule only, and is called again with the delays of a failed message; after a collision
or an outage, perhaps of another database, with `PAUSE`. One that hangs occupies a thread, and is reported with its stack, see
`relay.attending`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

from django.db import transaction
from django.db.models import QuerySet

from exactly_once.process.logs import escaping_logger
from exactly_once.process.outage import OutageLog
from exactly_once.sql.faults import is_collision
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.text import ERROR_LENGTH, printable
from outbox.conf import OutboxOptions, outbox_options
from outbox.contrib.recurring.declarations import GRACE, Declaration, declarations
from outbox.contrib.recurring.models import Schedule
from outbox.relay.attending import LONGEST_POLL, PAUSE, Attendant, call_bounded
from outbox.store.dialect import database_of

logger = escaping_logger(__name__)


def attendants(alias: str, options: OutboxOptions, *, database_log: OutageLog | None = None) -> Sequence[Attendant]:
    """The attendant of the schedules of this database; none without schedules."""
    here = {name: schedule for name, schedule in declarations.items() if database_of(schedule.when.using) == alias}
    claim, threads, limit = partial(_claim, alias, here, set()), options.CONCURRENCY, options.CALLBACK_TIMEOUT
    make = partial(Attendant, "recurring", alias, claim, options, database_log, threads=threads, limit=limit)
    # Two ticks of an interval must not be due at one look.
    poll = min([LONGEST_POLL, *(schedule.when.every / 2 for schedule in here.values() if schedule.when.every)])
    return [make(longest_poll=poll)] if here else []


def _claim(alias: str, here: Mapping[str, Declaration], running: set[str], most: int, without: Collection[str]) -> list[_Run]:
    """Find due schedules that neither this process nor another one works on; add the rows of new ones."""
    rows = {row.name: row for row in _rows(alias, name__in=here)}
    if new := here.keys() - rows.keys():
        made = (Schedule(name=name, position=DatabaseTime(), due_at=DatabaseTime()) for name in new)
        Schedule.objects.using(alias).bulk_create(made, ignore_conflicts=True)
        return _claim(alias, here, running, most, without)
    if not (due := [row.pk for name, row in rows.items() if name not in running and _is_due(row, here[name])]):
        return []
    with transaction.atomic(using=alias):
        free = list(_unlocked(alias, pk__in=due)[:most])
    running.update(row.name for row in free)
    return [_Run(row.name, alias, here[row.name], row.failures + 1, running) for row in free]


@dataclass(frozen=True)
class _Run:
    """The due ticks of one schedule, for the attendant. It has the lock of its row, and no claim."""

    group: str
    alias: str
    schedule: Declaration
    number: int
    running: set[str]

    def __str__(self) -> str:
        return f"the schedule {self.group}"

    def run(self) -> None:
        try:
            call_bounded(self.alias, outbox_options(), self.number, self._tick, self._defer)
        finally:
            self.running.discard(self.group)

    def _tick(self) -> None:
        """Publish the first tick that is due, and move the position to it."""
        when = self.schedule.when
        row = _unlocked(self.alias, name=self.group).first()
        if row is None or not _is_due(row, self.schedule):
            return
        now, position = row.database_now, row.position
        if row.recurrence not in {"", when.expression}:
            # What a new expression would have published before is not due. But relays with the old code may be running, which
            # have changed it back a moment ago. So a tick of the last minute is due, but once.
            position = max(position, now - GRACE)
        ticks = [] if row.paused_at else when.due(position, now)
        for position in ticks[:1]:
            self.schedule.publish(position, self.alias)
        due_at = next(chain(ticks[1:], when.upcoming(max(position, now))), None)
        self._update(recurrence=when.expression, position=position, due_at=due_at, failures=0, error="")

    def _defer(self, error: BaseException, reason: str, delay: timedelta) -> None:
        level = logging.WARNING if is_collision(error) else logging.ERROR
        self._update(error=printable(reason, ERROR_LENGTH), failures=self.number, due_at=DatabaseTime(delay))
        logger.log(level, "recurring: %s failed, and is called again in %s: %s.", self, delay, reason, exc_info=error)

    def _update(self, **columns: Any) -> None:
        Schedule.objects.using(self.alias).filter(name=self.group).update(**columns)

    def extend_claim(self) -> None:
        """The lock lasts as long as the transaction."""

    def give_back(self) -> None:
        """After an outage, which the attendant has logged: pause, or the function would be called without end."""
        with transaction.atomic(using=self.alias):
            if any(_is_due(row, self.schedule) for row in _unlocked(self.alias, name=self.group)):
                self._update(error="A database became unavailable: see the relay's log.", due_at=DatabaseTime(PAUSE))


def _rows(alias: str, **which: Any) -> QuerySet[Any]:
    return Schedule.objects.using(alias).filter(**which).annotate(database_now=DatabaseTime())


def _unlocked(alias: str, **which: Any) -> QuerySet[Any]:
    """Lock these rows, but not those that another relay works on."""
    return _rows(alias, **which).select_for_update(skip_locked=True)


def _is_due(row: Any, schedule: Declaration) -> bool:
    """Is its time here, or was its expression changed? One that fails waits in both cases."""
    is_time = row.due_at is not None and row.due_at <= row.database_now
    return (is_time and row.paused_at is None) or (row.recurrence != schedule.when.expression and not row.error)
