"""The timer's data: scheduled messages in a wheel, due messages by topic, and the offset up to which each topic was read.

It has no clock and no database: its caller passes the rows and the time. It can be discarded at any moment.

The wheel holds many timers without a sorted list. It is a ring of slots, each a set, and a hand that advances by one slot at
every tick (Varghese and Lauck, "Hashed and Hierarchical Timing Wheels", 1987, scheme 6). An entry that is due in d ticks is in
the slot (hand + d) mod N, and the hand passes it (d - 1) // N times before it fires. With the common d // N, an entry that is
due after an exact multiple of N would be one turn late.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from outbox.store.scheduling import Offset, Upcoming

OF_A_TOPIC = 5_000
"""Maximum messages of one topic held at a time, so that a burst does not hide other topics."""
OF_ALL_TOPICS = 50_000
"""Maximum messages held at a time. A million take 240 MB."""
_KEPT_FREE = 10
"""Loading leaves one part in this many (1/10) to messages that are scheduled later and due sooner, and to overdue ones."""
_LEAST_READ = 100
"""A topic is not read on before there is room for as many."""
_IN_FLIGHT_SECONDS = 0.25
"""Catching up finds rows whose transaction took up to this much longer from INSERT to COMMIT than those before it."""
_MOST_MISSING = 2_000
_MANY_TOPICS = 10_000
"""Maximum number of offsets kept for topics without held messages; every message may have a new topic."""
_TRIES = 3


class TimingWheel:
    """Positions of messages that become due after a number of ticks.

    Args:
        slots: number of slots in the ring, at least 1. A turn takes this many ticks; later positions need several turns.
    """

    def __init__(self, slots: int) -> None:
        self._slots: list[dict[int, int]] = [{} for _ in range(slots)]
        self._slot_of: dict[int, int] = {}
        self._hand = 0

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, position: int) -> bool:
        return position in self._slot_of

    def put(self, position: int, ticks: int) -> None:
        """Make `position` due in `ticks` from now; this replaces an earlier time of it.

        Raises:
            ValueError: `ticks` is less than 1.
        """
        if ticks < 1:
            raise ValueError(f"ticks is {ticks}: it must be at least 1, the next tick.")
        self.discard(position)
        slot = (self._hand + ticks) % len(self._slots)
        self._slots[slot][position] = (ticks - 1) // len(self._slots)
        self._slot_of[position] = slot

    def discard(self, position: int) -> None:
        """Remove `position` if it is in the wheel."""
        slot = self._slot_of.pop(position, None)
        if slot is not None:
            del self._slots[slot][position]

    def tick(self) -> list[int]:
        """Advance the hand by one slot; remove and return its due positions. The others there have one turn less left."""
        self._hand = (self._hand + 1) % len(self._slots)
        slot = self._slots[self._hand]
        due = [position for position, rounds in slot.items() if not rounds]
        for position in due:
            self.discard(position)
        for position in slot:
            slot[position] -= 1
        return due

    def ticks_to_next(self) -> int | None:
        """The number of ticks until the hand reaches a slot with positions; None if the wheel is empty."""
        if not self._slot_of:
            return None
        size = len(self._slots)
        return next(ticks for ticks in range(1, size + 1) if self._slots[(self._hand + ticks) % size])


class Timetable:
    """The timetable of one relay.

    Args:
        slots: of the wheel.
        tick: of the wheel, in seconds.
        now: this process's monotonic time in seconds, as in all methods.
    """

    def __init__(self, *, slots: int, tick: float, now: float) -> None:
        self._wheel = TimingWheel(slots)
        self._tick = tick
        self._began_at = now
        self._ticked = 0
        self._topic_of: dict[int, str] = {}
        self._place_of: dict[int, str] = {}
        self._in_hand: Counter[str] = Counter()
        self._due: dict[str, deque[int]] = {}
        self._tries: Counter[int] = Counter()
        self._read: dict[str, tuple[str, int]] = {}
        self._cut: set[str] = set()
        self._newest = deque([(now, 0)])

    @property
    def waiting(self) -> int:
        """The number of due messages."""
        return sum(map(len, self._due.values()))

    @property
    def is_short(self) -> bool:
        """Does a topic have unread messages, and room for at least as many as are held of it?"""
        share = self._free_to_load // max(len(self._cut), 1)
        return share >= _LEAST_READ and any(self._in_hand[topic] < min(share, OF_A_TOPIC / 2) for topic in self._cut)

    @property
    def cut_topics(self) -> Collection[str]:
        """The topics that may have unread messages."""
        return self._cut

    @property
    def room(self) -> int:
        """The number of messages that can be taken."""
        return max(OF_ALL_TOPICS - len(self._topic_of), 0)

    @property
    def newest(self) -> int:
        """The last position that was seen."""
        return self._newest[-1][1]

    @property
    def missing(self) -> list[int]:
        """Positions below it that were not seen, and were passed only a moment ago: their rows may be committed late."""
        first = max(self._newest[0][1] + 1, self.newest - _MOST_MISSING)
        return [position for position in range(first, self.newest) if position not in self._topic_of]

    def offsets(self, topics: Collection[str]) -> dict[str, Offset]:
        """The offsets of these topics, with the number of messages there is room for."""
        limits = dict.fromkeys(topics, 0) | {
            topic: max(min(OF_A_TOPIC - self._in_hand[topic], share), 0) for topic, share in _shares(topics, self._free_to_load)
        }
        return {topic: Offset(*self._read.get(topic, ("", 0)), limit) for topic, limit in limits.items()}

    def offsets_of_overdue(self, topics: Collection[str]) -> dict[str, Offset]:
        """The beginnings of those of these topics that have no due messages here."""
        asked = [topic for topic in topics if topic not in self._due]
        return {topic: Offset("", 0, min(OF_A_TOPIC, share)) for topic, share in _shares(asked, self.room)}

    @property
    def _free_to_load(self) -> int:
        return max(self.room - OF_ALL_TOPICS // _KEPT_FREE, 0)

    def read_on(self, found: Sequence[Upcoming], offsets: Mapping[str, Offset], now: float) -> None:
        """Take the rows that were found after these offsets, of all topics or of those that were cut."""
        brought = Counter(one.topic for one in found)
        self._cut = {topic for topic, offset in offsets.items() if brought[topic] >= offset.limit}
        self._read.update({one.topic: (one.at, one.position) for one in found})
        if len(self._read) > _MANY_TOPICS:
            self._read = {topic: offset for topic, offset in self._read.items() if topic in self._in_hand}
        self.take(found, now)

    def take(self, found: Iterable[Upcoming], now: float) -> None:
        """Take the rows that are not held yet."""
        newest = self._newest[-1][1]
        for one in found:
            newest = max(newest, one.position)
            if one.position not in self._topic_of:
                self._topic_of[one.position] = one.topic
                self._place_of[one.position] = one.place
                self._in_hand[one.topic] += 1
                self._put(one.position, one.due)
        self._newest.append((now, newest))
        while self._newest[1][0] <= now - _IN_FLIGHT_SECONDS:
            self._newest.popleft()

    def take_overdue(self, found: Sequence[Upcoming], now: float) -> None:
        """Take overdue rows. After a step of the database's clock they may be in the wheel with a later time."""
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
        """Turn the wheel to `now`."""
        passed = int((now - self._began_at) / self._tick)
        while self._ticked < passed and self._wheel:
            self._ticked += 1
            for position in self._wheel.tick():
                self._is_due(position)
        self._ticked = max(self._ticked, passed)

    def next_due(self, limit: int) -> dict[int, str]:
        """Up to `limit` due messages with their places, in equal parts from all topics as far as they have enough."""
        taken: list[int] = []
        while self._due and len(taken) < limit:
            share = max((limit - len(taken)) // len(self._due), 1)
            for topic, due in list(self._due.items()):
                taken += [due.popleft() for _ in range(min(share, len(due), limit - len(taken)))]
                if not due:
                    del self._due[topic]
        return {position: self._place_of[position] for position in taken}

    def fired(self, asked: Iterable[int], done: Collection[int]) -> None:
        """Record that of the `asked` messages those in `done` have been made ready.

        The others were cancelled, rescheduled or locked, or the database's clock is slightly behind. They are tried again at
        the next ticks, wherever they are; after that a sweep finds those that are still due.
        """
        for position in asked:
            if position in done or self._tries[position] >= _TRIES:
                self._drop(position)
            else:
                self._tries[position] += 1
                self._place_of[position] = ""
                self._wheel.put(position, 1)

    def _drop(self, position: int) -> None:
        self._wheel.discard(position)
        self._tries.pop(position, None)
        topic = self._topic_of.pop(position)
        del self._place_of[position]
        self._in_hand[topic] -= 1
        if not self._in_hand[topic]:
            del self._in_hand[topic]

    def next_tick(self) -> float:
        """The latest instant of the next turn of the wheel."""
        ticks = self._wheel.ticks_to_next()
        return math.inf if ticks is None else self._began_at + (self._ticked + ticks) * self._tick


def _shares(topics: Collection[str], room: int) -> list[tuple[str, int]]:
    """Equal parts of the room for these topics; for as many of them, chosen at random, as there is room for."""
    chosen = topics if len(topics) <= room else random.sample([*topics], room)
    return [(topic, room // len(chosen)) for topic in chosen]
