"""One refused topic must not starve the others.

A queue that is full or missing refuses every message of its topic, and a relay that tries them all in turn does nothing else
(a circuit breaker: Michael Nygard, "Release It!", 2007). After some refusals in a row without one success the topic rests,
longer each time. Its messages are put off without having been tried, so it costs them no attempt, and for so long that they are
not read again and again. After the rest a few of them are recalled and tried; when one is taken, all are recalled.

In memory, one relay's own: each relay finds out for itself, at the price of some refused messages.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import timedelta

from outbox.kernel.clock import monotonic

logger = logging.getLogger(__name__)

_REFUSALS = 20
_PROBES = 5
_RECALLED_AT_ONCE = 500
_REST_SECONDS = 1.0
_LONGEST_REST_SECONDS = 30.0
_PUT_OFF_SECONDS = (300.0, 600.0)
"""For how long, unless they are recalled: by then the relay that put them off may have ended."""


@dataclass
class _Breaker:
    refusals: int = 0
    rest_seconds: float = 0.0
    rests_until: float = 0.0
    probed: bool = False


class Breakers:
    """The breakers of all topics that had a refusal lately."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._breakers: dict[str, _Breaker] = {}
        self._recovered: set[str] = set()
        self._admitted: Counter[str] = Counter()

    def resume(self, topics: Iterable[str]) -> None:
        """A relay before us put messages of `topics` off. Try whether they are taken now."""
        self._recovered.update(topics)

    def begin(self) -> None:
        """A new pass: resting topics that are due may be tried again."""
        self._admitted.clear()

    def admits(self, topic: str) -> bool:
        """May one more message of `topic` be sent in this pass?"""
        breaker = self._breakers.get(topic)
        if breaker is None or not breaker.rest_seconds:
            return True
        if self._clock() < breaker.rests_until or self._admitted[topic] == _PROBES:
            return False
        self._admitted[topic] += 1
        return True

    @staticmethod
    def rest() -> timedelta:
        """For how long to put off messages that were not admitted."""
        return timedelta(seconds=random.uniform(*_PUT_OFF_SECONDS))

    def to_recall(self) -> list[tuple[str, int]]:
        """Of which topics to recall messages that were put off, and how many."""
        now = self._clock()
        due = [
            (topic, _PROBES)
            for topic, breaker in self._breakers.items()
            if breaker.rest_seconds and not breaker.probed and now >= breaker.rests_until
        ]
        return due + [(topic, _RECALLED_AT_ONCE) for topic in self._recovered]

    def recalled(self, topic: str, count: int) -> None:
        """So many messages of `topic` are ready again."""
        if breaker := self._breakers.get(topic):
            breaker.probed = True
        if not count:
            self._recovered.discard(topic)

    def note(self, taken: Collection[str], refused: Collection[str]) -> None:
        """What the broker said in a pass: the topics of the messages it took, and of those it refused."""
        if not self._breakers and not refused:
            return
        took = set(taken)
        for topic in took & self._breakers.keys():
            if self._breakers.pop(topic).rest_seconds:
                self._recovered.add(topic)
                logger.warning("The broker takes messages of topic %r again.", topic)
        for topic, count in Counter(refused).items():
            if topic not in took:
                breaker = self._breakers.setdefault(topic, _Breaker())
                breaker.refusals += count
                if breaker.refusals >= _REFUSALS or breaker.rest_seconds:
                    self._rest(topic, breaker)

    def _rest(self, topic: str, breaker: _Breaker) -> None:
        self._recovered.discard(topic)
        if not breaker.rest_seconds:
            logger.warning(
                "The broker refused %d messages of topic %r in a row; it is tried again now and then, other topics go on.",
                breaker.refusals,
                topic,
            )
        breaker.rest_seconds = min(max(2 * breaker.rest_seconds, _REST_SECONDS), _LONGEST_REST_SECONDS)
        breaker.rests_until = self._clock() + breaker.rest_seconds
        breaker.probed = False
