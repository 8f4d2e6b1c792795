"""What the timer has in hand: scheduled messages in a wheel, those that are due by topic, and how far each topic is read.

Pure: it is told what was read and what time it is, and can be thrown away at any moment.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence

from outbox.relay.wheel import TimingWheel
from outbox.store import Place, Upcoming

OF_A_TOPIC = 5_000
"""Most messages of one topic in hand, so that a burst of it neither fills the memory nor hides other topics."""
_IN_FLIGHT_SECONDS = 0.25
"""So much longer than its predecessors' may a transaction take, from its INSERT to its COMMIT, to be found by catching up."""
_MANY_TOPICS = 10_000
"""So many are remembered as read, though nothing of them is in hand; a topic may be new with each message."""
_TRIES = 3


class Timetable:
    """One relay's.

    Args:
        slots: of the wheel.
        tick: of the wheel, in seconds.
        now: this process's monotonic time in seconds, as everywhere here.
    """

    def __init__(self, *, slots: int, tick: float, now: float) -> None:
        self._wheel: TimingWheel[int] = TimingWheel(slots)
        self._tick = tick
        self._began_at = now
        self._ticked = 0
        self._topic_of: dict[int, str] = {}
        self._in_hand: Counter[str] = Counter()
        self._due: dict[str, deque[int]] = {}
        self._tries: Counter[int] = Counter()
        self._read: dict[str, tuple[str, int]] = {}
        self._cut: set[str] = set()
        self._newest = deque([(now, 0)])

    @property
    def waiting(self) -> int:
        """How many messages are due."""
        return sum(map(len, self._due.values()))

    @property
    def burdened(self) -> Collection[str]:
        """The topics that have messages due."""
        return self._due.keys()

    @property
    def is_short(self) -> bool:
        """Does some topic have more to come than was taken, and room for it?"""
        return any(self._in_hand[topic] < OF_A_TOPIC / 2 for topic in self._cut)

    @property
    def newest(self) -> int:
        """The last position that was seen some time ago. Of what lies behind it, something may have been committed since."""
        return self._newest[0][1]

    def places(self) -> dict[str, Place]:
        """Where to go on reading each topic that has been read, and how much of it."""
        return {topic: Place(at, position, self._room(topic)) for topic, (at, position) in self._read.items()}

    def _room(self, topic: str) -> int:
        return max(OF_A_TOPIC - self._in_hand[topic], 0)

    def read_on(self, found: Sequence[Upcoming], now: float) -> None:
        """Take what was found behind `places()`."""
        brought = Counter(one.topic for one in found)
        still_full = {topic for topic in self._cut if not self._room(topic)}
        self._cut = still_full | {topic for topic, count in brought.items() if count >= self._room(topic)}
        self._read.update({one.topic: (one.at, one.position) for one in found})
        if len(self._read) > _MANY_TOPICS:
            self._read = {topic: place for topic, place in self._read.items() if topic in self._in_hand}
        self.take(found, now)

    def take(self, found: Iterable[Upcoming], now: float) -> None:
        """Take what is not in hand yet. Its seconds were counted before `now`, so it is never earlier than they say."""
        newest = self._newest[-1][1]
        for one in found:
            newest = max(newest, one.position)
            if one.position not in self._topic_of:
                self._topic_of[one.position] = one.topic
                self._in_hand[one.topic] += 1
                self._put(one.position, now + one.seconds)
        self._newest.append((now, newest))
        while self._newest[1][0] <= now - _IN_FLIGHT_SECONDS:
            self._newest.popleft()

    def take_overdue(self, found: Sequence[Upcoming], now: float) -> None:
        """Take what should have been made ready before. It is in the wheel for later when the database's clock has leapt."""
        for one in found:
            if one.position in self._wheel:
                self._drop(one.position)
        self.take(found, now)

    def _put(self, position: int, at: float) -> None:
        ticks = math.ceil((at - self._began_at) / self._tick) - self._ticked
        if ticks > 0:
            self._wheel.put(position, ticks)
        else:
            self._is_due(position)

    def _is_due(self, position: int) -> None:
        self._due.setdefault(self._topic_of[position], deque()).append(position)

    def advance(self, now: float) -> None:
        """Turn the wheel to this moment."""
        passed = int((now - self._began_at) / self._tick)
        while self._ticked < passed and self._wheel:
            self._ticked += 1
            for position in self._wheel.tick():
                self._is_due(position)
        self._ticked = max(self._ticked, passed)

    def next_due(self, limit: int) -> list[int]:
        """Up to `limit` of what is due, of each topic as many as of any other as far as there are."""
        taken: list[int] = []
        while self._due and len(taken) < limit:
            share = max((limit - len(taken)) // len(self._due), 1)
            for topic, due in list(self._due.items()):
                taken += [due.popleft() for _ in range(min(share, len(due), limit - len(taken)))]
                if not due:
                    del self._due[topic]
        return taken

    def fired(self, asked: Iterable[int], done: Collection[int]) -> None:
        """Of those that were `asked` for these have been made ready.

        The others were cancelled, put off or locked, or the database's clock is a little behind: they are asked for again, at
        the next ticks. What comes of them later a sweep finds.
        """
        for position in asked:
            if position in done or self._tries[position] >= _TRIES:
                self._drop(position)
            else:
                self._tries[position] += 1
                self._wheel.put(position, 1)

    def _drop(self, position: int) -> None:
        self._wheel.discard(position)
        self._tries.pop(position, None)
        topic = self._topic_of.pop(position)
        self._in_hand[topic] -= 1
        if not self._in_hand[topic]:
            del self._in_hand[topic]

    def next_tick(self) -> float:
        """When the wheel must be turned again, at the latest."""
        ticks = self._wheel.ticks_to_next()
        return math.inf if ticks is None else self._began_at + (self._ticked + ticks) * self._tick
