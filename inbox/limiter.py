"""The rate limit of a handler, in one of its processes.

All processes of a handler share one token bucket (`store.buckets`). Each leases from it in portions that it uses up in some
fifty milliseconds and keeps for no longer than twice that, so the database is asked some twenty times a second at any rate,
and what is used in any span is never more than what the bucket gave out in that span and the moment before it. What a
process leased and did not use in time is lost, never made up for; so the size of its portions follows what it uses.

Nobody who takes tokens waits for a database: a thread of this process's own leases what was asked for in vain. While the
database is away nothing is granted.
"""

from __future__ import annotations

import logging
import random
import threading

from django.db import DatabaseError, InterfaceError, connections

from inbox.conf import InboxOptions
from inbox.handlers import Handler
from inbox.store.buckets import Leased, lease_tokens
from outbox.kernel.clock import monotonic
from outbox.kernel.databases import drop_unusable_connections
from outbox.kernel.faults import is_collision
from outbox.kernel.retry import Pause
from outbox.kernel.text import describe

logger = logging.getLogger(__name__)

BURST_SECONDS = 0.1
PORTION_SECONDS = 0.05
PREFETCH_SECONDS = 2.0

_LONGEST_KEEP = 1.0
_DEMAND_SECONDS = 1.0
_SHORTEST_REST = 0.025
_LONGEST_REST = 5.0
_SOON = 0.005
_IDLE_SECONDS = 1.0


def prefetch(handler: Handler, options: InboxOptions) -> int:
    """How many unanswered deliveries of `handler` this process may have in hand: what its rate allows in two seconds.

    At least 1 and at most PREFETCH. More would wait here for their tokens, until the broker takes them for lost.
    """
    if handler.rate_limit is None:
        return options.PREFETCH
    return max(1, min(options.PREFETCH, int(handler.rate_limit * PREFETCH_SECONDS)))


class Limiter:
    """How many messages of one handler may run now. Shared by all threads of this process; see `limiter_of`.

    Attributes:
        rate: messages a second, in all processes together.
        burst: most tokens the shared bucket holds: one, and what the rate brings in a tenth of a second.
    """

    def __init__(self, handler: Handler) -> None:
        if handler.rate_limit is None:
            raise ValueError(f"The handler {handler.name} has no rate_limit.")
        self.rate = handler.rate_limit
        self.burst = 1.0 + self.rate * BURST_SECONDS
        self._name = handler.name
        self._alias = handler.using
        # At a low rate a token is worth waiting for: who asked for it may come back a little later.
        self._keep = max(2 * PORTION_SECONDS, min(_LONGEST_KEEP, 1.0 / self.rate))
        self._largest = max(1, int(self.rate * PORTION_SECONDS))
        self._lock = threading.Lock()
        self._leasing = threading.Lock()
        self._tokens = 0
        self._portion = 1
        self._whole = False
        self._leased = 0
        self._leased_at = 0.0
        self._wanted_at: float | None = None
        self._ask_at = 0.0
        self._pause = Pause()
        self._away = False

    def take(self, most: int) -> int:
        """How many of `most` messages may run now; 0 is none. Each is one token, to be used at once or given back.

        Never waits and never touches a database. What was short is leased meanwhile, for whoever asks next.
        """
        with self._lock:
            taken = self._take(most)
        if taken < most:
            _lessor.wake(self)
        return taken

    def take_or_lease(self, most: int) -> int:
        """As `take`, for a thread that may wait for the database and is in no transaction: it leases for itself."""
        with self._lock:
            taken = self._take(most)
        if not taken and self.lease():
            with self._lock:
                taken = self._take(most)
        return taken

    def give_back(self, tokens: int) -> None:
        """They were taken just now and nothing was run: another thread of this process may have them."""
        with self._lock:
            self._tokens += tokens

    def wait_seconds(self) -> float:
        """When to ask again: seconds until a token may be there; 0 when one is."""
        with self._lock:
            self._drop_stale()
            return 0.0 if self._tokens else max(_SOON, self._ask_at - monotonic())

    @property
    def is_wanted(self) -> bool:
        """Was more asked for than was there, a moment ago?"""
        wanted_at = self._wanted_at
        return wanted_at is not None and monotonic() - wanted_at < _DEMAND_SECONDS

    def lease(self) -> bool:
        """Lease the next portion when it is time to; are there tokens now? Waits for the database."""
        # One thread of this process at a time; what it brings is for all of them.
        with self._leasing:
            if not (rest := self.wait_seconds()):
                return True
            if rest > _SOON:
                return False
            drop_unusable_connections()
            try:
                leased = lease_tokens(self._alias, self._name, rate=self.rate, burst=self.burst, most=self._portion)
            except (DatabaseError, InterfaceError) as error:
                self._grant_nothing(error)
                return False
            self._put_in(leased)
            return leased.tokens > 0

    def _take(self, most: int) -> int:
        self._drop_stale()
        taken = min(most, self._tokens)
        self._tokens -= taken
        if taken and not self._tokens and self._whole and monotonic() - self._leased_at < PORTION_SECONDS:
            self._portion = min(2 * self._portion, self._largest)
        self._wanted_at = monotonic() if taken < most else None
        return taken

    def _drop_stale(self) -> None:
        if self._tokens and monotonic() - self._leased_at > self._keep:
            self._portion = max(1, self._leased - self._tokens)
            self._tokens = 0

    def _put_in(self, leased: Leased) -> None:
        with self._lock:
            self._leased_at = monotonic()
            self._leased = leased.tokens
            self._whole = leased.tokens == self._portion
            self._tokens += leased.tokens
            self._ask_at = 0.0
            if leased.left < 1:
                # Until then others may have taken it; the jitter keeps processes from asking in step.
                rest = max(_SHORTEST_REST, (self._largest - leased.left) / self.rate) + random.uniform(0, 0.01)
                self._ask_at = self._leased_at + min(rest, _LONGEST_REST)
            if self._away:
                self._away = False
                logger.warning("%s: its token bucket on %r answers again.", self._name, self._alias)
            self._pause.reset()

    def _grant_nothing(self, error: Exception) -> None:
        with self._lock:
            if is_collision(error):
                self._ask_at = monotonic() + random.uniform(0, _SHORTEST_REST)
                return
            self._ask_at = monotonic() + self._pause.next_seconds()
            if not self._away:
                self._away = True
                logger.warning(
                    "%s: its token bucket on %r does not answer (%s). Its messages wait until it does.",
                    self._name,
                    self._alias,
                    describe(error),
                )


def limiter_of(handler: Handler) -> Limiter | None:
    """The limiter of `handler` in this process, the same for every thread; None when it has no rate limit."""
    if handler.rate_limit is None:
        return None
    with _registering:
        limiter = _limiters.get(handler.name)
        if limiter is None or limiter.rate != handler.rate_limit:
            limiter = _limiters[handler.name] = Limiter(handler)
        return limiter


class _Lessor:
    """The thread that leases what was asked for in vain. It begins when somebody does and ends when nobody does any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanting: set[Limiter] = set()
        self._bell = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self, limiter: Limiter) -> None:
        with self._lock:
            if limiter in self._wanting and self._thread is not None and self._thread.is_alive():
                return
            self._wanting.add(limiter)
            # After a fork the thread is gone.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="inbox-lessor", daemon=True)
                self._thread.start()
        self._bell.set()

    def _work(self) -> None:
        try:
            while self._serve():
                pass
        except Exception:
            logger.exception("Leasing tokens met an error nobody foresaw; it begins anew with the next message.")
        finally:
            connections.close_all()
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _serve(self) -> bool:
        """Lease for all that want; False when nobody has wanted anything for a while."""
        with self._lock:
            wanting = list(self._wanting)
        served = [limiter for limiter in wanting if not limiter.is_wanted or limiter.lease()]
        rest = min((limiter.wait_seconds() for limiter in wanting if limiter not in served), default=_IDLE_SECONDS)
        with self._lock:
            self._wanting.difference_update(served)
        rung = self._bell.wait(min(rest, _DEMAND_SECONDS))
        self._bell.clear()
        with self._lock:
            if rung or self._wanting:
                return True
            self._thread = None
            return False


_registering = threading.Lock()
_limiters: dict[str, Limiter] = {}
_lessor = _Lessor()
