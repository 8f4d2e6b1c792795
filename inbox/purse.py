"""The tokens that one process has leased from the shared bucket of a handler, and how many it leases next.

A portion is meant to last for some fifty milliseconds, so that the database is asked some twenty times a second at any rate.
What is not used in twice that time is lost: so what is used in any span is never more than what the bucket gave out in that
span and the moment before it, however many processes there are. The size of the next portion follows what this process uses,
doubled while a whole portion is used up early (slow start, Jacobson 1988), or a slow process would keep others from theirs.

Pure arithmetic: the caller says what time it is (monotonic, in seconds) and keeps other threads out.
"""

from __future__ import annotations

import random

BURST_SECONDS = 0.1
PORTION_SECONDS = 0.05
_LONGEST_KEEP = 1.0
_SHORTEST_REST = 0.025
_LONGEST_REST = 5.0


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
        self._tokens = 0
        self._leased = 0
        self._leased_at = 0.0
        self._whole = False

    def tokens(self, now: float) -> int:
        """How many may be taken."""
        if self._tokens and now - self._leased_at > self.keep:
            self.portion = max(1, self._leased - self._tokens)
            self._tokens = 0
        return self._tokens

    def take(self, most: int, now: float) -> int:
        taken = min(most, self.tokens(now))
        self._tokens -= taken
        if taken and not self._tokens and self._whole and now - self._leased_at < PORTION_SECONDS:
            self.portion = min(2 * self.portion, self._largest)
        return taken

    def give_back(self, tokens: int) -> None:
        self._tokens += tokens

    def put_in(self, leased: int, left: float, now: float) -> None:
        """The bucket gave `leased` tokens of the portion asked for, and has `left`."""
        self._whole = leased == self.portion
        self._tokens += leased
        self._leased, self._leased_at = leased, now
        self.ask_at = now
        if left < 1:
            # The jitter keeps processes from asking in step.
            rest = max(_SHORTEST_REST, (self._largest - left) / self.rate) + random.uniform(0, 0.01)
            self.ask_at = now + min(rest, _LONGEST_REST)

    def rest(self, seconds: float, now: float) -> None:
        """The bucket does not answer: do not ask for so long."""
        self.ask_at = now + seconds
