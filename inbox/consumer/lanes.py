"""Deliveries that no worker has taken yet: one lane for each queue.

A lane knows how many its handler takes at a time: one message, a batch, a group commit, or all that are waiting.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import kombu

from inbox.conf import InboxOptions
from inbox.consumer.answers import Delivery
from inbox.handlers.handler import Handler
from inbox.limits.limiter import limiter_of
from inbox.limits.shedder import shedder_of
from inbox.limits.slots import UNLIMITED, slots_of

STORED_AT_ONCE = 100
"""Deliveries that are stored in one transaction, if their handler does not run them here."""
_RATED_SECONDS = 2.0
"""As many deliveries are fetched for a handler with a rate limit as its rate allows in this time."""
CHECKED_AT_ONCE = 100
"""Deliveries that are checked together for load shedding."""
LOAD_BYTES = 8 * 1024 * 1024
"""Maximum total size of the bodies in one load of several deliveries: a worker decodes and stores a load at once."""


def size_of(handler: Handler) -> int:
    """How many deliveries of this handler one worker takes at once."""
    return STORED_AT_ONCE if handler.is_stored_first else handler.kind.size


def prefetch_of(handler: Handler, options: InboxOptions) -> int:
    """How many unanswered deliveries of one queue this process may have: the current load and the next."""
    size = size_of(handler)
    if handler.is_stored_first:
        # It takes fewer as well, and PREFETCH is what limits the memory that large messages take.
        size = min(size, 2 * options.PREFETCH)
    most = options.PREFETCH
    if handler.rate_limit is not None:
        # More would wait here for tokens until the broker's `consumer_timeout`.
        most = max(1, min(most, int(handler.rate_limit * _RATED_SECONDS)))
    return most if size == 1 else max(most, 2 * size)


class Lane:
    """The deliveries of one queue, in order. Not thread-safe: its owner holds a lock.

    Attributes:
        wait: the longest wait for a load to fill, in seconds.
        slots: a worker that has run a load leaves the slot of the handler's `concurrency` that `take` took.
    """

    def __init__(self, handler: Handler, queue: kombu.Queue | None = None) -> None:
        self.handler = handler
        self.queue: Any = queue
        self._waiting: list[Delivery] = []
        self._checked = 0  # so many of the first ones are not dropped by load shedding
        self._most = size_of(handler)
        self.wait = handler.kind.wait.total_seconds()
        # Messages that are stored first are limited where they are run; one load at a time is stored, in its order.
        self._stores = handler.is_stored_first
        self._limiter = None if self._stores else limiter_of(handler)
        self.slots = UNLIMITED if self._stores else slots_of(handler)
        self._shedder = shedder_of(handler)
        self._is_running = False
        self._paused_until = self._backoff = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, delivery: Delivery) -> None:
        self._waiting.append(delivery)

    def take(self, now: float) -> list[Delivery]:
        """The next load for a worker, which leaves its slot after it; empty if none is ready."""
        if self.seconds_left(now) > 0 or not self.slots.take():
            return []
        most = fitting(delivery.size for delivery in self._waiting[: min(self._most, self._ready)])
        if self._limiter is not None:
            most = self._limiter.take(most)
        if not most:
            self.slots.leave()
        self._is_running = self._stores and most > 0
        if self._backoff and most:
            # One worker retries a load that could not be finished; the next one only after another backoff.
            self._paused_until = now + self._backoff
        self._checked = max(0, self._checked - most)
        return self._remove(0, most)

    def take_next(self, now: float) -> Delivery | None:
        """The next delivery for the worker that has run one, and keeps its slot; None if there is none that it can run now."""
        if not self._ready or now < self._paused_until or (self._limiter is not None and not self._limiter.take(1)):
            return None
        self._checked = max(0, self._checked - 1)
        return self._remove(0, 1)[0]

    def seconds_left(self, now: float) -> float:
        """Seconds until a load may be ready; infinite if it needs another delivery, or a worker to finish."""
        if not self._ready or self._is_running or not self.slots.is_free:
            return inf
        unfilled = self.wait - (now - self._waiting[0].at) if self._ready < self._most else 0.0
        return max(0.0, self._paused_until - now, unfilled, self._limiter.wait_seconds() if self._limiter is not None else 0.0)

    def take_to_check(self, now: float) -> list[Delivery]:
        """While the handler sheds load: deliveries to check. Pass those that are not dropped to `put_checked`.

        They cost no rate-limit tokens, because dropped messages are not run.
        """
        if not self._is_shedding or now < self._paused_until:
            return []
        unchecked = self._waiting[self._checked : self._checked + CHECKED_AT_ONCE]
        return self._remove(self._checked, fitting(delivery.size for delivery in unchecked))

    def put_checked(self, checked: list[Delivery]) -> None:
        """Put checked deliveries that are not dropped before the others."""
        self._waiting[self._checked : self._checked] = checked
        self._checked += len(checked)

    @property
    def _is_shedding(self) -> bool:
        return self._shedder is not None and self._shedder.is_shedding

    @property
    def is_filling(self) -> bool:
        """Does a batch wait for further deliveries? A worker knows since the first one until when, and need not be woken."""
        return self.wait > 0 and not self._is_shedding and 1 < len(self) < self._most

    @property
    def _ready(self) -> int:
        """How many may be taken now; during load shedding, only checked ones."""
        return self._checked if self._is_shedding else len(self)

    def done(self) -> None:
        """A worker has finished a load of this lane."""
        self._is_running = False
        self._paused_until = self._backoff = 0.0

    def put_back(self, load: list[Delivery], now: float, *, backoff: float) -> None:
        """A worker could not finish these: they are next, after `backoff` seconds."""
        current = [delivery for delivery in load if delivery.acks.is_open]
        # In order of arrival, regardless of the order in which workers return their loads.
        self._replace(sorted([*current, *self._waiting], key=lambda delivery: delivery.at))
        self._is_running = False
        self._backoff, self._paused_until = backoff, now + backoff

    @property
    def token_lease(self) -> Callable[[], object] | None:
        """What leases the tokens that it lacks, for a worker that may do so now."""
        return self._limiter.lease if self._limiter is not None and self._limiter.may_lease else None

    def give_back_tokens(self, count: int) -> None:
        """Return the tokens of deliveries that were not handled; they take tokens again."""
        if self._limiter is not None:
            self._limiter.give_back(count)

    def drop_ended(self) -> int:
        """Drop the deliveries of channels that have ended, because the broker delivers them again. Returns how many."""
        count = len(self)
        self._replace(delivery for delivery in self._waiting if delivery.acks.is_open)
        return count - len(self)

    @property
    def oldest(self) -> float:
        """Arrival of the oldest waiting delivery; infinite if the lane is empty."""
        return min((delivery.at for delivery in self._waiting), default=inf)

    @property
    def is_stuck(self) -> bool:
        """Its last load could not be finished."""
        return self._backoff > 0

    def stale(self, before: float, now: float) -> list[Delivery]:
        """Remove and return a load of those that arrived before `before`; none of an ordered lane, or of one in backoff."""
        if self.handler.ordered or now < self._paused_until or self.oldest >= before:
            return []
        found = [delivery for delivery in self._waiting if delivery.at < before]
        del found[fitting(delivery.size for delivery in found) :]
        self._replace(delivery for delivery in self._waiting if delivery not in found)
        return found

    def _replace(self, waiting: Iterable[Delivery]) -> None:
        """They are checked again, if the handler sheds load."""
        self._waiting, self._checked = [*waiting], 0

    def _remove(self, begin: int, count: int) -> list[Delivery]:
        removed = self._waiting[begin : begin + count]
        del self._waiting[begin : begin + count]
        return removed


def fitting(sizes: Iterable[int]) -> int:
    """How many bodies of these sizes fit into one load: at least one, of any size."""
    count = total = 0
    for size in sizes:
        total += size
        if count and total > LOAD_BYTES:
            break
        count += 1
    return count
