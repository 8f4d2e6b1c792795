"""Floors: the positions at which a reader of ready messages starts in each shard.

PostgreSQL keeps the dead versions of updated rows until a vacuum removes them, and a vacuum cannot while an old transaction is
open. A reader that starts at the first row would read the dead versions of all rows published meanwhile, and slow down with
every message (Brandur Leach, "Postgres Job Queues & Failure By MVCC"). So it starts at its floor.

A position becomes a floor when no ready row can appear below it any more. A position is drawn from the sequence before its row
is committed, so an empty range is not sufficient: the transactions that had drawn positions when the position was seen must
have ended, and a later query must have found no rows of theirs. A transaction that draws a position holds a lock on the
sequence until its commit is visible, and PostgreSQL reports the holders. So a transaction that only reads, or writes elsewhere,
does not delay a floor, however long it is open. A row that becomes ready again draws another position.

Occasionally a query starts at the first row, less often the longer that takes, to find rows that an operator made ready by
hand.
"""

from collections.abc import Callable, Sequence

from exactly_once.process.clock import monotonic
from outbox.store.looking import WorkFound

_MOVE_SECONDS = 0.5
_LOOK_FROM_THE_START_SECONDS = 2.0
_LOOKING_SHARE = 50
"""Queries from the first row take at most one part in this many of the time (1/50)."""


class Floors:
    """The floors of one relay, by shard.

    Args:
        writers: returns the open transactions that have drawn a position.

    Attributes:
        now: the present floors.
    """

    def __init__(
        self, shards: Sequence[int], writers: Callable[[], frozenset[str]], clock: Callable[[], float] = monotonic
    ) -> None:
        self._shards = shards
        self._writers = writers
        self._clock = clock
        self._move_at = self._begun_at = self._look_from_the_start_at = clock()
        self.forget()

    def forget(self) -> None:
        """Reset the floors. After an outage the database may have lost its last rows, and may draw their positions again."""
        self.now: dict[int, int] = {}
        self._seen = self._reached = self._candidate = 0
        self._must_end: frozenset[str] = frozenset()

    def saw(self, position: int) -> None:
        """Record that a message has been read that became ready at `position`."""
        self._seen = max(self._seen, position)

    def begin(self) -> bool:
        """Begin a query. Should it start at the first row?"""
        self._begun_at = self._clock()
        if self._candidate and self._must_end and self._begun_at >= self._move_at:
            self._must_end &= self._writers()
            self._move_at = self._begun_at + _MOVE_SECONDS
        return self._begun_at >= self._look_from_the_start_at

    def end(self, found: WorkFound) -> None:
        """End the query with its result."""
        now = self._clock()
        if self._begun_at >= self._look_from_the_start_at:
            self._look_from_the_start_at = now + max(_LOOK_FROM_THE_START_SECONDS, _LOOKING_SHARE * (now - self._begun_at))
            if any(position <= self.now.get(shard, 0) for shard, position in found.first.items()):
                self.forget()
        if self._candidate and not self._must_end:
            self.now = {shard: min(self._candidate, found.first.get(shard, self._candidate + 1) - 1) for shard in self._shards}
            self._candidate = 0
        if not self._candidate and self._seen > self._reached and now >= self._move_at:
            self._candidate = self._reached = self._seen
            self._must_end = self._writers()
            self._move_at = now + _MOVE_SECONDS
