"""The tokens that one process has leased from the shared bucket of a handler, and the size of the next lease.

A portion should last about 50 ms, so that the database is queried about 20 times a second at any rate. Tokens expire after
twice that time. So the tokens used in any period never exceed those that the bucket granted in that period and just before it,
however many processes there are. The next portion follows this process's use: doubled if more is needed early, halved when
tokens expire (Jacobson 1988); otherwise a slow process would take tokens from the others.

Pure arithmetic: the caller passes the time (monotonic, in seconds) and serialises the calls.
"""

import random
from collections import deque
from dataclasses import dataclass

BURST_SECONDS = 0.1
PORTION_SECONDS = 0.05
_LONGEST_LIFETIME_SECONDS = 1.0
_SHORTEST_BACKOFF_SECONDS = 0.025
_LONGEST_BACKOFF_SECONDS = 5.0
_EARLY_LEASE_FROM = 4


@dataclass(slots=True)
class _Portion:
    """Tokens that were leased together and expire together. `whole`: the bucket granted the full request."""

    leased: int
    left: int
    leased_at: float
    whole: bool


class TokenCache:
    """One process's share of a rate.

    Attributes:
        rate: messages a second, in all processes together.
        burst: most tokens that the shared bucket holds: one, and a tenth of a second's rate.
        keep: seconds after which the unused tokens of a portion expire.
        portion: how many tokens to lease next.
        ask_at: when to lease them, at the earliest.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.burst = 1.0 + rate * BURST_SECONDS
        # At a low rate, tokens live longer: the thread that needs one may return later.
        self.lifetime = max(2 * PORTION_SECONDS, min(_LONGEST_LIFETIME_SECONDS, 1.0 / rate))
        self.portion = 1
        self.next_lease_at = 0.0
        self._largest = max(1, int(rate * PORTION_SECONDS))
        self._portions: deque[_Portion] = deque()
        self._latest: _Portion | None = None

    def tokens(self, now: float) -> int:
        """The number of unexpired tokens."""
        while self._portions and now - self._portions[0].leased_at > self.lifetime:
            expired = self._portions.popleft()
            if expired.left:
                # At least half: a process that paused briefly continues as fast as before.
                self.portion = max(1, expired.leased - expired.left, self.portion // 2)
        return sum(portion.left for portion in self._portions)

    def wants_more(self, now: float) -> bool:
        """Should the next portion be leased before this one is used up? Small portions are leased when no token is left."""
        return self.portion >= _EARLY_LEASE_FROM and 2 * self.tokens(now) <= self.portion

    def take(self, most: int, now: float) -> int:
        wanted = min(most, self.tokens(now))
        taken = 0
        while taken < wanted:
            oldest = self._portions[0]
            count = min(wanted - taken, oldest.left)
            oldest.left -= count
            taken += count
            if not oldest.left:
                self._portions.popleft()
        self._grow(now, short=taken < most)
        return taken

    def give_back(self, tokens: int, now: float) -> None:
        if not self._portions:
            self._portions.append(_Portion(0, 0, now, whole=False))
        self._portions[0].left += tokens

    def add(self, leased: int, left: float, now: float) -> None:
        """The bucket granted `leased` tokens of the requested portion, and has `left`."""
        if leased:
            self._latest = _Portion(leased, leased, now, whole=leased == self.portion)
            self._portions.append(self._latest)
        self.next_lease_at = now
        if left < 1:
            # The jitter keeps processes from asking in sync.
            wait = max(_SHORTEST_BACKOFF_SECONDS, (self._largest - left) / self.rate) + random.uniform(0, 0.01)
            self.next_lease_at = now + min(wait, _LONGEST_BACKOFF_SECONDS)

    def _grow(self, now: float, *, short: bool) -> None:
        latest, early = self._latest, PORTION_SECONDS if short else PORTION_SECONDS / 2
        if latest and latest.whole and (short or self.wants_more(now)) and now - latest.leased_at < early:
            self.portion = min(2 * latest.leased, self._largest)
            self._latest = None

    def back_off(self, seconds: float, now: float) -> None:
        """The bucket is unavailable: lease nothing for `seconds`."""
        self.next_lease_at = now + seconds
