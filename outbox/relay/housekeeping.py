"""Housekeeping beside the relay: make partitions ahead, drop history older than `KEEP_HISTORY`, delete old entries.

The entries are those of the trail and of the audit log, and bulk operations that have ended. See
`upkeep.housekeeping`; the history of a day without a partition is in the default partition.
"""

from collections.abc import Sequence
from datetime import timedelta
from math import inf

from django.db import connections

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.process.loop import StopRequest
from exactly_once.sql.days import date_of, last_day
from exactly_once.upkeep.history import DayKeeper
from exactly_once.upkeep.housekeeping import CHUNK, Housekeeping
from outbox.conf import OutboxOptions
from outbox.models import TrailEntry
from outbox.store import history
from outbox.store.unique import delete_names_left_behind

logger = escaping_logger(__name__)

_PASS_MARGIN = timedelta(seconds=3)
"""A pass of a relay ends before BATCH_DEADLINE and this."""
_LONGEST_WAIT = timedelta(seconds=10)
"""Passes, and publishers of unique messages, wait as long."""
_PENDING_REPORT_SECONDS = 24 * 3600.0


class Housekeeper(Housekeeping):
    """A companion of the relay that keeps the history of one database in order."""

    app = "outbox"

    def __init__(self, alias: str, options: OutboxOptions) -> None:
        super().__init__(alias)
        self._options = options
        longest_wait = min(options.BATCH_DEADLINE + _PASS_MARGIN, _LONGEST_WAIT)
        self._days = DayKeeper("outbox", alias, history.HISTORY, longest_wait)
        self._reported_pending_at = -inf
        self._names_until = 0

    def _steps(self, stop: StopRequest) -> None:
        self._days.keep(self._last)
        self._report_pending_days()
        self._delete(self._days.deletions(self._last, chunk=CHUNK), stop)
        self._delete_entries(TrailEntry, self._options, stop)
        last = self._last
        if last != self._names_until and self._delete(delete_names_left_behind(self._alias, last, chunk=CHUNK), stop):
            self._names_until = last

    @property
    def _last(self) -> int:
        return last_day(self._alias, self._options.keeps)

    def _report_pending_days(self) -> None:
        if monotonic() - self._reported_pending_at < _PENDING_REPORT_SECONDS:
            return
        if pending := history.days_with_pending_callbacks(self._alias, self._last):
            self._reported_pending_at = monotonic()
            logger.warning(
                "housekeeping: history of %s is older than OUTBOX['KEEP_HISTORY'] and is not dropped, because callbacks of its "
                "messages are pending. See exactly_once_status, or the pending callbacks in the admin.",
                ", ".join(str(date_of(day)) for day in pending),
            )


def housekeepers(alias: str, options: OutboxOptions) -> Sequence[Housekeeper]:
    """The housekeeper of a relay process; none inside the transaction of a test, which makes no partitions."""
    return () if connections[alias].in_atomic_block else (Housekeeper(alias, options),)
