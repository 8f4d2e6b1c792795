"""One refused topic must not starve the others.

A queue that is full or missing refuses every message of its topic, and a relay that tries them all in turn does nothing else
(a circuit breaker: Michael Nygard, "Release It!", 2007). After some refusals in a row without one success the topic rests,
longer each time. Its messages are put off without having been tried, so it costs them no attempt, and for so long that they are
not read again and again. After the rest a few of them are recalled and tried; when one is taken, all are recalled.

A topic that the broker *forbids* is paused at the first refusal, because each one costs the connection, and is probed with one
message at a time, which the relay sends alone.

In memory, one relay's own: each relay finds out for itself, at the price of some refused messages.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
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
_REFUSED = "The broker refused %d messages of topic %r in a row; it is tried again now and then, other topics go on."
_FORBIDDEN = (
    "relay: topic %r paused, because the broker forbids it; one message is tried at least every %.0f s, other topics go on. "
    "Permit the relay's user to write to it (rabbitmqctl set_topic_permissions or set_permissions), or cancel its messages: %s"
)


@dataclass
class _Breaker:
    refusals: int = 0
    rest_seconds: float = 0.0
    rests_until: float = 0.0
    probed: bool = False
    forbidden: bool = False

    @property
    def probes(self) -> int:
        """How many of its messages are tried after a pause."""
        return 1 if self.forbidden else _PROBES


class Breakers:
    """The breakers of all topics that had a refusal lately.

    Attributes:
        beside: those of the other lanes of this process. What one of them has reported is not reported again.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.beside: Sequence[Breakers] = ()
        self._clock = clock
        self._breakers: dict[str, _Breaker] = {}
        self._recovered: set[str] = set()
        self._admitted: Counter[str] = Counter()

    def resume(self, topics: Iterable[str]) -> None:
        """There are deferred messages of `topics`. Try those that are not paused here: who paused them may have ended."""
        self._recovered.update(topic for topic in topics if not self._is_paused(topic))

    def begin(self) -> None:
        """A new pass: resting topics that are due may be tried again."""
        self._admitted.clear()

    def admits(self, topic: str) -> bool:
        """May one more message of `topic` be sent in this pass?"""
        breaker = self._breakers.get(topic)
        if breaker is None or not breaker.rest_seconds:
            return True
        if self._clock() < breaker.rests_until or self._admitted[topic] == breaker.probes:
            return False
        self._admitted[topic] += 1
        return True

    def forbids(self, topic: str) -> bool:
        """Did the broker say that it does not permit `topic`, the last time it was asked?"""
        breaker = self._breakers.get(topic)
        return breaker is not None and breaker.forbidden

    @staticmethod
    def rest() -> timedelta:
        """For how long to put off messages that were not admitted."""
        return timedelta(seconds=random.uniform(*_PUT_OFF_SECONDS))

    def to_recall(self) -> list[tuple[str, int]]:
        """Of which topics to recall messages that were put off, and how many."""
        now = self._clock()
        due = [
            (topic, breaker.probes)
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
                    is_reported = self._is_reported(topic)
                    self._rest(topic, breaker)
                    if not is_reported:
                        logger.warning(_REFUSED, breaker.refusals, topic)
                breaker.forbidden = False

    def forbid(self, topic: str, reason: str) -> None:
        """The broker does not permit `topic`."""
        is_reported = self._is_reported(topic, forbidden=True)
        breaker = self._breakers.setdefault(topic, _Breaker())
        breaker.forbidden = True
        self._rest(topic, breaker)
        if not is_reported:
            logger.warning(_FORBIDDEN, topic, _LONGEST_REST_SECONDS, reason)

    def _is_paused(self, topic: str) -> bool:
        breaker = self._breakers.get(topic)
        return breaker is not None and breaker.rest_seconds > 0

    def _is_reported(self, topic: str, *, forbidden: bool = False) -> bool:
        """Has a lane of this process paused `topic` already, for this reason or for the graver one?"""
        for breakers in (self, *self.beside):
            breaker = breakers._breakers.get(topic)  # noqa: SLF001 - of the same class
            if breaker is not None and breaker.rest_seconds and breaker.forbidden >= forbidden:
                return True
        return False

    def _rest(self, topic: str, breaker: _Breaker) -> None:
        self._recovered.discard(topic)
        breaker.rest_seconds = min(max(2 * breaker.rest_seconds, _REST_SECONDS), _LONGEST_REST_SECONDS)
        # Each probe of a forbidden topic costs the connection, so those of many topics must not come at once.
        spread = random.uniform(0.5, 1.0) if breaker.forbidden else 1.0
        breaker.rests_until = self._clock() + spread * breaker.rest_seconds
        breaker.probed = False
