"""Where in the stream of each shard a reader may begin.

PostgreSQL keeps the dead versions of updated rows until a vacuum takes them, and while any old transaction is open no vacuum
may. A reader that begins at the first row would wade through everything published meanwhile, and slow down with every message
(Brandur Leach, "Postgres Job Queues & Failure By MVCC"). So it begins at its floor.

A position becomes a floor when nothing ready can appear below it any more. Positions are drawn before they are committed, so
it is not enough to see nothing there: the transactions that had drawn one when the position was seen must have ended, and a
look after their end must have found nothing of theirs. Whoever draws a position holds a lock on the sequence until its commit
is visible, and PostgreSQL tells who does. So neither a transaction that only reads nor one that writes elsewhere holds a floor
back, however long it is open. A row that becomes ready again lies aside and not in the stream.

Now and then a look begins at the very start all the same, more rarely the longer that takes, for rows that somebody made ready
by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from outbox.kernel.clock import monotonic
from outbox.store import Sight

_MOVE_SECONDS = 0.5
_LOOK_FROM_THE_START_SECONDS = 2.0
_LOOKING_SHARE = 50
"""Looks from the start take at most one part in this many of the time."""


class Floors:
    """One relay's floors, by shard.

    Args:
        writers: asks the database for the transactions that have drawn a position and not ended.
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
        """Begin anew. After an outage the database may be one that has lost its end, and draws positions once more."""
        self._floors: dict[int, int] = {}
        self._seen = self._reached = self._candidate = 0
        self._must_end: frozenset[str] = frozenset()

    @property
    def now(self) -> Mapping[int, int]:
        return self._floors

    def saw(self, position: int) -> None:
        """A message at `position` has been read."""
        self._seen = max(self._seen, position)

    def begin(self) -> bool:
        """A look begins. Should it be one from the start?"""
        self._begun_at = self._clock()
        if self._candidate and self._must_end and self._begun_at >= self._move_at:
            self._must_end &= self._writers()
            self._move_at = self._begun_at + _MOVE_SECONDS
        return self._begun_at >= self._look_from_the_start_at

    def end(self, sight: Sight) -> None:
        """The look has ended, and this is what it found."""
        now = self._clock()
        if self._begun_at >= self._look_from_the_start_at:
            self._look_from_the_start_at = now + max(_LOOK_FROM_THE_START_SECONDS, _LOOKING_SHARE * (now - self._begun_at))
            if any(position <= self._floors.get(shard, 0) for shard, position in sight.first.items()):
                self.forget()
        if self._candidate and not self._must_end:
            self._floors = {
                shard: min(self._candidate, sight.first.get(shard, self._candidate + 1) - 1) for shard in self._shards
            }
            self._candidate = 0
        if not self._candidate and self._seen > self._reached and now >= self._move_at:
            self._candidate = self._reached = self._seen
            self._must_end = self._writers()
            self._move_at = now + _MOVE_SECONDS
