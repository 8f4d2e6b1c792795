"""The rate limit of a handler, in one of its processes.

All processes of a handler share one token bucket (`store.buckets`). Each leases small portions of it (`TokenCache`) and takes
tokens from these. `take` never waits for a database: a worker leases missing tokens before it takes messages. While the
database is unavailable, no tokens are granted.
"""

import random
import threading
from collections import defaultdict, deque
from dataclasses import dataclass

from exactly_once.process.clock import monotonic
from exactly_once.process.outage import Outage
from exactly_once.sql.connections import drop_unusable_connections
from exactly_once.sql.faults import is_collision
from exactly_once.wire.text import describe
from inbox.handlers.handler import Handler
from inbox.store.buckets import lease_tokens
from inbox.transactions.sessions import end_session

_SHORTEST_WAIT_SECONDS = 0.005
_COLLISION_BACKOFF_SECONDS = 0.025
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
    """The tokens that one process has leased from the shared bucket of a handler, and the size of the next lease.

    A portion should last about 50 ms, so that the database is queried about 20 times a second at any rate. Tokens expire after
    twice that time. So the tokens used in any period never exceed those that the bucket granted in that period and just before
    it, however many processes there are. The next portion follows this process's use: doubled if more is needed early, halved
    when tokens expire (Jacobson 1988); otherwise a slow process would take tokens from the others.

    Pure arithmetic: the caller passes the time (monotonic, in seconds) and serialises the calls.

    Attributes:
        rate: messages a second, in all processes together.
        burst: most tokens that the shared bucket holds: one, and a tenth of a second's rate.
        lifetime: seconds after which the unused tokens of a portion expire.
        portion: how many tokens to lease next.
        next_lease_at: when to lease them, at the earliest.
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


_leasing: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
"""By database: one thread of this process at a time leases tokens from it, and can be held up by it."""


class Limiter:
    """How many messages of one handler may run now. Shared by all threads of this process; see `limiter_of`.

    Attributes:
        is_wanted: the last `take` needed more tokens than there were, or nearly all, and none were leased since.
    """

    def __init__(self, handler: Handler) -> None:
        if handler.rate_limit is None:
            raise ValueError(f"The handler {handler.name} has no rate_limit.")
        self._name = handler.name
        self._alias = handler.using
        self._cache = TokenCache(handler.rate_limit)
        self._lock = threading.Lock()
        self._leasing = _leasing[handler.using]
        self.is_wanted = False
        self._outage = Outage(f"the bucket of {handler.name}'s rate limit in the database {handler.using!r}")

    def take(self, most: int) -> int:
        """How many of `most` messages may run now. Each is one token, to be used at once or given back."""
        with self._lock:
            now = monotonic()
            taken = self._cache.take(most, now)
            self.is_wanted = taken < most or self._cache.wants_more(now)
            return taken

    def take_or_lease(self, most: int) -> int:
        """As `take`, but leases missing tokens on this thread, which is outside any transaction."""
        return self.take(most) or (self.take(most) if self.lease() else 0)

    def give_back(self, tokens: int) -> None:
        """Return tokens taken just now and not used: another thread of this process may take them."""
        with self._lock:
            self._cache.give_back(tokens, monotonic())

    def wait_seconds(self) -> float:
        """Seconds until the next `take`: 0 if a token is available, or can be leased."""
        with self._lock:
            now = monotonic()
            if self._cache.tokens(now):
                return 0.0
            return max(_SHORTEST_WAIT_SECONDS if self._leasing.locked() else 0.0, self._cache.next_lease_at - now)

    @property
    def may_lease(self) -> bool:
        """Is a lease wanted and due, and does no other thread make it?"""
        return self.is_wanted and not self._leasing.locked() and monotonic() >= self._cache.next_lease_at

    def lease(self) -> bool:
        """Lease the next portion if it is due and no other thread does; are there enough tokens now? Waits for the database."""
        if not self._leasing.acquire(blocking=False):
            return False
        try:
            with self._lock:
                cache, now, self.is_wanted = self._cache, monotonic(), False
                has_enough = cache.tokens(now) > 0 and not cache.wants_more(now)
                if has_enough or now < cache.next_lease_at:
                    return has_enough
            drop_unusable_connections()
            leased = lease_tokens(self._alias, self._name, rate=cache.rate, burst=cache.burst, most=cache.portion)
        except Exception as error:  # noqa: BLE001 - an error of a custom database backend must not end the worker
            self._back_off(error)
            return False
        else:
            self._outage.over()
            with self._lock:
                cache.add(leased.tokens, leased.left, monotonic())
            return leased.tokens > 0
        finally:
            self._leasing.release()

    def _back_off(self, error: Exception) -> None:
        if is_collision(error):
            seconds = random.uniform(0, _COLLISION_BACKOFF_SECONDS)
        else:
            # A handler or a failover may have left the session in a bad state.
            end_session(self._alias)
            seconds = self._outage.record(describe(error))
        with self._lock:
            self._cache.next_lease_at = monotonic() + seconds


_limiters: dict[tuple[str, float], Limiter] = {}


def limiter_of(handler: Handler) -> Limiter | None:
    """The limiter of a handler, shared by all threads of this process; None if it has no rate limit."""
    if handler.rate_limit is None:
        return None
    key = handler.name, handler.rate_limit
    return _limiters.get(key) or _limiters.setdefault(key, Limiter(handler))
