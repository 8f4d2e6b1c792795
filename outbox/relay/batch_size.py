"""The number of messages in one pass.

It is BATCH_SIZE until a pass fails. After a failure that does not depend on the size the next pass takes one message, and each
successful pass doubles the number. A pass that took too long was too large: the next one takes a quarter, and for a minute the
limit is half.
"""

from collections.abc import Callable

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger

logger = escaping_logger(__name__)

_TOO_LARGE_SECONDS = 60.0
_BETWEEN_REPORTS_SECONDS = 60.0


class BatchSize:
    """The batch size of one relay, up to `largest`."""

    def __init__(self, largest: int, clock: Callable[[], float] = monotonic) -> None:
        self._largest = self._ceiling = self._now = largest
        self._clock = clock
        self._raise_at = self._report_at = 0.0

    @property
    def now(self) -> int:
        return self._now

    def succeeded(self) -> None:
        """A pass of this size succeeded."""
        if self._ceiling < self._largest and self._clock() >= self._raise_at:
            self._set_ceiling(2 * self._ceiling)
        self._now = min(2 * self._now, self._ceiling)

    def failed(self) -> None:
        """A pass failed, and its messages are sent again: take only one message next."""
        self._now = 1

    def overdue(self, reason: object) -> None:
        """A pass of this size took too long."""
        before, self._now = self._now, max(self._now // 4, 1)
        self._set_ceiling(max(before // 2, 1))
        if self._clock() >= self._report_at:
            self._report_at = self._clock() + _BETWEEN_REPORTS_SECONDS
            logger.warning(
                "relay: a pass over up to %d messages took too long (%s); they stay ready, and the next pass takes up to %d. "
                "If this repeats, find out what slows the outbox table down, or set a longer OUTBOX['BATCH_DEADLINE'].",
                before,
                reason,
                self._now,
            )

    def _set_ceiling(self, ceiling: int) -> None:
        self._ceiling = min(ceiling, self._largest)
        self._raise_at = self._clock() + _TOO_LARGE_SECONDS
