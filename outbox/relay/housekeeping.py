"""Housekeeping beside the relay: make partitions ahead, drop history older than `KEEP_HISTORY`, delete old entries.

The entries are those of the trail and of the audit log, and bulk operations that have ended. See
`operators.housekeeping`; the history of a day without a partition is in the default partition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import inf

from django.db import DatabaseError, connections

from exactly_once.operators.housekeeping import CHUNK, Housekeeping
from exactly_once.process.clock import monotonic
from exactly_once.process.logs import Reminder
from exactly_once.process.loop import StopRequest
from exactly_once.sql.faults import is_canceled, is_collision, sqlstate_of
from exactly_once.wire.text import describe
from outbox.conf import OutboxOptions
from outbox.models import TrailEntry
from outbox.operators.operations import operations
from outbox.store import claiming, history

logger = logging.getLogger(__name__)

_DAYS_AHEAD = 3
_PASS_MARGIN = timedelta(seconds=3)
"""A pass of a relay ends before BATCH_DEADLINE and this."""
_LONGEST_WAIT = timedelta(seconds=10)
"""Passes, and publishers of unique messages, wait as long."""
_BETWEEN_WAITS_SECONDS = 3600.0
_PENDING_REPORT_SECONDS = 24 * 3600.0
_OWNER = (
    "housekeeping of %r: the database user of this relay may not make or drop partitions of history (%s). Messages are "
    "relayed; new history is in its default partition, and old rows are deleted one by one. Make that user the owner of the "
    "tables of the outbox, with the right to create tables in their schema."
)


class Housekeeper(Housekeeping):
    """A companion of the relay that keeps the history of one database in order."""

    app = "outbox"

    def __init__(self, alias: str, options: OutboxOptions) -> None:
        super().__init__(alias)
        self._options = options
        self._refusals = Reminder()
        self._reported_pending_at = -inf
        self._wait_again_at = -inf
        self._deleted_until = 0
        self._unmakeable: set[int] = set()

    def _steps(self, stop: StopRequest) -> None:
        if claiming.claims_by_locks(self._alias):
            self._make_days()
            self._drop_days()
        self._report_pending_days()
        self._delete_days(stop)
        self._delete_entries(TrailEntry, operations, self._options, stop)

    def _make_days(self) -> None:
        today, existing = history.day_of(self._alias), set(history.days(self._alias))
        for day in range(today, today + _DAYS_AHEAD + 1):
            if day not in existing | self._unmakeable:
                self._attempt(history.make_day, day, is_urgent=day <= today + 1)

    def _drop_days(self) -> None:
        last = self._last
        for day in history.days(self._alias):
            if day <= last and self._attempt(history.drop_day, day, is_urgent=day < last):
                logger.info("Dropped the outbox's history of %s.", history.date_of(day))

    def _delete_days(self, stop: StopRequest) -> None:
        """Delete old rows; those of the default partition once for each day, because that reads all of it."""
        last = self._last
        if last != self._deleted_until and self._delete(history.delete_days(self._alias, last, chunk=CHUNK), stop):
            self._deleted_until = last if claiming.claims_by_locks(self._alias) else 0

    @property
    def _last(self) -> int:
        """The last day that is older than the retention from beginning to end."""
        return history.day_of(self._alias, self._options.keeps) - 1

    def _attempt(self, change: Callable[[str, int, timedelta | None], bool], day: int, *, is_urgent: bool) -> bool:
        """Make or drop the partition of a day. If that is impossible now, log why; the next round tries again.

        Args:
            is_urgent: wait for history as long as a pass may last, at most `_LONGEST_WAIT`. Other passes wait meanwhile, so a
                wait in vain, as behind a backup, is not repeated for an hour.
        """
        waits = is_urgent and monotonic() >= self._wait_again_at
        longest = min(self._options.BATCH_DEADLINE + _PASS_MARGIN, _LONGEST_WAIT)
        try:
            return change(self._alias, day, longest if waits else None)
        except DatabaseError as error:
            if waits and sqlstate_of(error) != history.CHECK_VIOLATION:
                self._wait_again_at = monotonic() + _BETWEEN_WAITS_SECONDS
            if sqlstate_of(error) == history.INSUFFICIENT_PRIVILEGE:
                if self._refusals.is_due():
                    logger.warning(_OWNER, self._alias, describe(error))
            elif is_collision(error) or is_canceled(error):
                # For example, a transaction that reads or writes history is open. Waiting for it would delay the relays.
                logger.debug("History of %s is in use: %s", history.date_of(day), error)
            elif sqlstate_of(error) == history.CHECK_VIOLATION:
                self._unmakeable.add(day)
            else:
                raise
            return False

    def _report_pending_days(self) -> None:
        if monotonic() - self._reported_pending_at < _PENDING_REPORT_SECONDS:
            return
        if pending := history.days_with_pending_callbacks(self._alias, self._last):
            self._reported_pending_at = monotonic()
            logger.warning(
                "housekeeping: history of %s is older than OUTBOX['KEEP_HISTORY'] and is not dropped, because callbacks of its "
                "messages are pending. See exactly_once_status, or the pending callbacks in the admin.",
                ", ".join(str(history.date_of(day)) for day in pending),
            )


def housekeepers(alias: str, options: OutboxOptions) -> Sequence[Housekeeper]:
    """The housekeeper of a relay process; none inside the transaction of a test, which makes no partitions."""
    return () if connections[alias].in_atomic_block else (Housekeeper(alias, options),)
