"""The size of a pass: how many messages and how many shards a relay tries to claim.

The number of messages is BATCH_SIZE until a pass fails. After a failure that does not depend on the size the next pass takes
one message, and each successful pass doubles the number. A pass that took too long was too large: the next one takes a quarter,
and for a minute the limit is half.

The number of shards is found without knowing how many relays there are, by additive increase and multiplicative decrease (Chiu
and Jain, 1989), as in TCP: a relay that finds a shard claimed by another halves its number, one that finds all of them free
raises it by a few. Several relays converge to equal shares; a single relay gets all shards.
"""

import random
from collections.abc import Callable, Sequence

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from outbox.store.looking import BusyShard

logger = escaping_logger(__name__)

_TOO_LARGE_SECONDS = 60.0
_BETWEEN_REPORTS_SECONDS = 60.0
_LEAST_SHARDS = 8
_STEP = 4


class BatchSize:
    """The batch size of one relay, up to `largest`.

    Attributes:
        now: the maximum number of messages in the next pass.
    """

    def __init__(self, largest: int, clock: Callable[[], float] = monotonic) -> None:
        self._largest = self._ceiling = self.now = largest
        self._clock = clock
        self._raise_at = self._report_at = 0.0

    def succeeded(self) -> None:
        """A pass of this size succeeded."""
        if self._ceiling < self._largest and self._clock() >= self._raise_at:
            self._set_ceiling(2 * self._ceiling)
        self.now = min(2 * self.now, self._ceiling)

    def failed(self) -> None:
        """A pass failed, and its messages are sent again: take only one message next."""
        self.now = 1

    def overdue(self, reason: object) -> None:
        """A pass of this size took too long."""
        before, self.now = self.now, max(self.now // 4, 1)
        self._set_ceiling(max(before // 2, 1))
        if self._clock() >= self._report_at:
            self._report_at = self._clock() + _BETWEEN_REPORTS_SECONDS
            logger.warning(
                "relay: a pass over up to %d messages took too long (%s); they stay ready, and the next pass takes up to %d. "
                "If this repeats, find out what slows the outbox table down, or set a longer OUTBOX['BATCH_DEADLINE'].",
                before,
                reason,
                self.now,
            )

    def _set_ceiling(self, ceiling: int) -> None:
        self._ceiling = min(ceiling, self._largest)
        self._raise_at = self._clock() + _TOO_LARGE_SECONDS


class Share:
    """One relay's share of `shards`, their total number.

    Attributes:
        most: how many shards it tries now in one pass.
    """

    def __init__(self, shards: int) -> None:
        self._shards = self.most = shards

    def of(self, shards: Sequence[BusyShard]) -> list[BusyShard]:
        """The shards to try next, chosen at random so that relays seldom conflict and no shard is always last."""
        return random.sample(shards, min(len(shards), self.most))

    def record(self, refused: int) -> None:
        """Record that `refused` of the tried shards were claimed by others."""
        self.most = max(self.most // 2, _LEAST_SHARDS) if refused else min(self.most + _STEP, self._shards)
