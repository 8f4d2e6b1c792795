"""The tokens that one process has leased from the shared bucket of a handler, and how many it leases next.

A portion is meant to last for some fifty milliseconds, so that the database is asked some twenty times a second at any rate.
What is not used in twice that time is lost: so what is used in any span is never more than what the bucket gave out in that
span and the moment before it, however many processes there are. The size of the next portion follows what this process uses,
doubled while more is asked for early and halved when some is lost (Jacobson 1988), or a slow process would keep others from
theirs.

Pure arithmetic: the caller says what time it is (monotonic, in seconds) and keeps other threads out.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

BURST_SECONDS = 0.1
PORTION_SECONDS = 0.05
_LONGEST_KEEP = 1.0
_SHORTEST_REST = 0.025
_LONGEST_REST = 5.0
_AHEAD_FROM = 4


@dataclass(slots=True)
class _Portion:
    """Leased together, and lost together. `whole`: the bucket gave all that was asked for."""

    leased: int
    left: int
    leased_at: float
    whole: bool


class Purse:
    """One process's part of a rate.

    Attributes:
        rate: messages a second, in all processes together.
        burst: most tokens that the shared bucket holds: one, and what the rate brings in a tenth of a second.
        keep: seconds after which what is left of a portion is lost.
        portion: how many tokens to lease next.
        ask_at: when to lease them, at the earliest.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.burst = 1.0 + rate * BURST_SECONDS
        # At a low rate each token is worth waiting for: who asked for it may take a moment to come back.
        self.keep = max(2 * PORTION_SECONDS, min(_LONGEST_KEEP, 1.0 / rate))
        self.portion = 1
        self.ask_at = 0.0
        self._largest = max(1, int(rate * PORTION_SECONDS))
        self._portions: deque[_Portion] = deque()
        self._latest: _Portion | None = None

    def tokens(self, now: float) -> int:
        """How many may be taken."""
        while self._portions and now - self._portions[0].leased_at > self.keep:
            lost = self._portions.popleft()
            if lost.left:
                # Half of it at least: a process that only stood still for a moment goes on as fast as before.
                self.portion = max(1, lost.leased - lost.left, self.portion // 2)
        return sum(portion.left for portion in self._portions)

    def wants_more(self, now: float) -> bool:
        """Is it time to lease before the last portion is used up? Small ones are leased when somebody asks in vain."""
        return self.portion >= _AHEAD_FROM and 2 * self.tokens(now) <= self.portion

    def take(self, most: int, now: float) -> int:
        wanted = min(most, self.tokens(now))
        taken = 0
        while taken < wanted:
            oldest = self._portions[0]
            some = min(wanted - taken, oldest.left)
            oldest.left -= some
            taken += some
            if not oldest.left:
                self._portions.popleft()
        self._grow(now, short=taken < most)
        return taken

    def give_back(self, tokens: int, now: float) -> None:
        if not self._portions:
            self._portions.append(_Portion(0, 0, now, whole=False))
        self._portions[0].left += tokens

    def put_in(self, leased: int, left: float, now: float) -> None:
        """The bucket gave `leased` tokens of the portion asked for, and has `left`."""
        if leased:
            self._latest = _Portion(leased, leased, now, whole=leased == self.portion)
            self._portions.append(self._latest)
        self.ask_at = now
        if left < 1:
            # The jitter keeps processes from asking in step.
            rest = max(_SHORTEST_REST, (self._largest - left) / self.rate) + random.uniform(0, 0.01)
            self.ask_at = now + min(rest, _LONGEST_REST)

    def _grow(self, now: float, *, short: bool) -> None:
        latest, early = self._latest, PORTION_SECONDS if short else PORTION_SECONDS / 2
        if latest and latest.whole and (short or self.wants_more(now)) and now - latest.leased_at < early:
            self.portion = min(2 * latest.leased, self._largest)
            self._latest = None

    def rest(self, seconds: float, now: float) -> None:
        """The bucket does not answer: do not ask for so long."""
        self.ask_at = now + seconds
