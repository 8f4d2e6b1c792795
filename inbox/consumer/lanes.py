"""What has been delivered and nobody has in hand yet: one lane for each queue.

A lane knows what its handler takes at a time: one message, a batch, what shares a commit, or as many as there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice

import kombu

from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler
from inbox.limits.limiter import limiter_of, prefetch
from inbox.limits.shedder import shedder_of
from inbox.limits.slots import slots_of

TAKEN_IN_AT_ONCE = 100
"""Deliveries of an ordered handler that are stored in one transaction."""
SIFTED_AT_ONCE = 100
"""Deliveries that are looked through together for those to be dropped."""
LOAD_BYTES = 8 * 1024 * 1024
"""Bodies that one load may have together, unless it is a single delivery: what a worker decodes and stores at a time."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message from the broker and the life of the channel it came on.

    Attributes:
        at: when it came (monotonic).
        refused: why kombu could not unpack it, or "".
    """

    epoch: int
    handler: Handler
    message: kombu.Message
    at: float
    refused: str = ""

    @property
    def redelivered(self) -> bool:
        return bool(self.message.delivery_info.get("redelivered"))

    @property
    def size(self) -> int:
        """Of the body, in bytes, or in characters where a virtual transport has them."""
        return len(self.message.body or b"")


class Undecided(Exception):
    """A worker could not end a load, because its database does not answer: it is to be taken again.

    Attributes:
        load: the deliveries of it that have no answer yet, in their order.
        seconds: how long to leave them alone.
        everywhere: the database answers nobody, so what others of its handlers have to do rests as well.
    """

    def __init__(self, load: list[Delivery], seconds: float, *, everywhere: bool) -> None:
        super().__init__(f"{len(load)} deliveries are undecided")
        self.load = load
        self.seconds = seconds
        self.everywhere = everywhere


def size_of(handler: Handler) -> int:
    """How many deliveries of this handler one worker takes at once."""
    if handler.ordered:
        return TAKEN_IN_AT_ONCE
    return handler.batch.size if handler.batch else handler.group_commit


def prefetch_of(handler: Handler, options: InboxOptions) -> int:
    """How many unanswered deliveries of one queue this process may have: what is in hand, and the next load on its way."""
    size = size_of(handler)
    return prefetch(handler, options) if size == 1 else max(prefetch(handler, options), 2 * size)


class Lane:
    """The deliveries of one queue, in their order. Not thread-safe: whoever owns it holds a lock."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self._waiting: deque[Delivery] = deque()
        self._kept: deque[Delivery] = deque()
        self._most = size_of(handler)
        self._wait = handler.batch.wait.total_seconds() if handler.batch else 0.0
        # Taking in is not handling: an ordered handler's messages are limited where they are run.
        self._limiter = None if handler.ordered else limiter_of(handler)
        self._slots = None if handler.ordered else slots_of(handler)
        self._shedder = shedder_of(handler)
        self._in_hand = False
        self._rests_until = self._rest = 0.0
        self._forgot_at = float("-inf")

    def __len__(self) -> int:
        return len(self._kept) + len(self._waiting)

    def put(self, delivery: Delivery) -> None:
        self._waiting.append(delivery)

    def take(self, now: float, *, hurry: bool = False) -> list[Delivery]:
        """The next load for a worker, who calls `leave_slot` after it; empty when there is none yet.

        `hurry` does not wait for a batch to fill.
        """
        if self.seconds_left(now, hurry=hurry) > 0 or (self._slots is not None and not self._slots.take()):
            return []
        most = _fitting(chain(self._kept, self._waiting), min(self._most, self._ready))
        if self._limiter is not None:
            most = self._limiter.take(most)
        if not most:
            self.leave_slot()
        self._in_hand = bool(self.handler.ordered) and most > 0
        if self._rest and most:
            # What could not be ended is tried by one worker; the next one tries only after another rest.
            self._rests_until = now + self._rest
        return [(self._kept or self._waiting).popleft() for _ in range(most)]

    def seconds_left(self, now: float, *, hurry: bool = False) -> float:
        """How long until there may be a load to take; infinite when only another delivery, or a worker's end, brings one."""
        if not self._ready or self._in_hand or (self._slots is not None and not self._slots.is_free):
            return float("inf")
        unfilled = 0.0
        if not hurry and self._ready < self._most:
            unfilled = self._wait - (now - (self._kept or self._waiting)[0].at)
        return max(0.0, self._rests_until - now, unfilled, self._limiter.wait_seconds() if self._limiter is not None else 0.0)

    def take_to_sift(self, now: float) -> list[Delivery]:
        """While too many wait in the queue: deliveries to be looked through. What is not dropped is to be kept.

        They cost no token of a rate limit: of what is dropped, nothing is run.
        """
        if not self._is_shedding or now < self._rests_until:
            return []
        most = _fitting(self._waiting, min(SIFTED_AT_ONCE, len(self._waiting)))
        return [self._waiting.popleft() for _ in range(most)]

    def keep(self, sifted: list[Delivery]) -> None:
        """These are not dropped: they are next."""
        self._kept.extend(sifted)

    @property
    def _is_shedding(self) -> bool:
        return self._shedder is not None and self._shedder.is_shedding

    @property
    def _ready(self) -> int:
        """How many may be taken now; while too many wait, only what has been looked through."""
        return len(self._kept) if self._is_shedding else len(self)

    def done(self) -> None:
        """A worker has ended a load of this lane: of an ordered handler only one is in hand at a time."""
        self._in_hand = False
        self._rests_until = self._rest = 0.0

    def put_back(self, load: list[Delivery], now: float, *, rest: float) -> None:
        """A worker could not end these: they are next, after `rest` seconds."""
        current = [delivery for delivery in load if delivery.at > self._forgot_at]
        # In the order they came in, whichever worker gives its load back first.
        self._waiting = deque(sorted([*current, *self._waiting], key=lambda delivery: delivery.at))
        self._in_hand = False
        self._rest, self._rests_until = rest, now + rest

    def leave_slot(self) -> None:
        """A worker has run a load, so another one may run the next, if the handler's `concurrency` was reached."""
        if self._slots is not None:
            self._slots.leave()

    def give_back_tokens(self, count: int) -> None:
        """So many that were taken have not been handled, and will take tokens again."""
        if self._limiter is not None:
            self._limiter.give_back(count)

    def drop_others(self, epoch: int) -> None:
        """Forget what came in another life than `epoch`; the broker delivers it again."""
        self._waiting = deque(delivery for delivery in self._waiting if delivery.epoch == epoch)
        self._kept = deque(delivery for delivery in self._kept if delivery.epoch == epoch)

    def forget(self, now: float) -> int:
        """Everything that has come until now has been given back to the broker; how many of these waited here."""
        count = len(self)
        self._kept.clear()
        self._waiting.clear()
        self._forgot_at = now
        return count

    @property
    def oldest(self) -> float:
        """When what has waited for the longest came; infinite when nothing waits."""
        return min((delivery.at for delivery in (*self._kept, *self._waiting)), default=float("inf"))

    @property
    def is_stuck(self) -> bool:
        """Its last load could not be ended."""
        return self._rest > 0

    def stale(self, before: float, now: float) -> list[Delivery]:
        """Take out what has waited since `before`. Nothing is taken out of an order, nor while the lane rests."""
        if self.handler.ordered or now < self._rests_until or self.oldest >= before:
            return []
        found = [delivery for delivery in (*self._kept, *self._waiting) if delivery.at < before]
        self._kept = deque(delivery for delivery in self._kept if delivery.at >= before)
        self._waiting = deque(delivery for delivery in self._waiting if delivery.at >= before)
        return found


def _fitting(waiting: Iterable[Delivery], most: int) -> int:
    """How many of the first `most` make one load: at least one, however large it is."""
    if most <= 1:
        return most
    size = 0
    for count, delivery in enumerate(islice(waiting, most)):
        size += delivery.size
        if count and size > LOAD_BYTES:
            return count
    return most
