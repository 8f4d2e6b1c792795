"""How many threads of this process run one handler at a time: its `concurrency`, by default all but one.

So a handler whose runs hang leaves a thread to the others. If it is the only one of its process, it may use all threads.

A thread that runs a message of such a handler holds one of its slots, for deliveries and stored messages alike. Both kinds get
slots in turn; otherwise stored messages would wait as long as deliveries arrive. So after the runner has found no free slot for
a stored message, a slot that a delivery used is not given to another delivery until the runner has polled again.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from math import inf

from exactly_once.process.clock import monotonic
from inbox.handlers.handler import Handler

_RESERVED_SECONDS = 0.2
"""The longest reservation for the runner. It may be unable to poll, because its database is unavailable."""


class Slots:
    """The slots of one handler. Shared by all threads of this process; see `slots_of`."""

    def __init__(self, count: float) -> None:
        self.count = count
        self._lock = threading.Lock()
        self._taken: list[tuple[int, float]] = []
        self._was_for_delivery = False
        self._wake_runner: Callable[[], object] | None = None
        self._reserved_until = 0.0

    @property
    def is_free(self) -> bool:
        """May a worker take one now, for deliveries?"""
        is_reserved = self._was_for_delivery and self._wake_runner and monotonic() < self._reserved_until
        return len(self._taken) < self.count and not is_reserved

    def all_taken_for(self) -> tuple[float, int] | None:
        """If all are taken: how many seconds ago the last of them was, and the thread that took the first."""
        with self._lock:
            taken = [*self._taken]
        return (monotonic() - taken[-1][1], taken[0][0]) if len(taken) >= self.count else None

    def take(self) -> bool:
        """Take one for deliveries."""
        with self._lock:
            if not self.is_free:
                return False
            self._taken.append((threading.get_ident(), monotonic()))
            self._was_for_delivery = True
            return True

    def take_for_stored(self, wake: Callable[[], object]) -> bool:
        """Take one before polling for a stored message. If none is free, call `wake` once one is; it must not raise."""
        with self._lock:
            if len(self._taken) >= self.count:
                self._wake_runner = wake
                return False
            self._wake_runner = None
            self._taken.append((threading.get_ident(), monotonic()))
            return True

    def give_back(self) -> None:
        """Return a slot taken by `take_for_stored`: no message is due."""
        with self._lock:
            self._free()
            self._wake_runner = None

    def begin_stored(self) -> None:
        """Use a slot taken by `take_for_stored`: a message is run."""
        self._was_for_delivery = False

    def leave(self) -> None:
        """Free the slot after the run."""
        with self._lock:
            self._free()
            wake = self._wake_runner
            self._reserved_until = monotonic() + _RESERVED_SECONDS
        if wake is not None:
            wake()

    def _free(self) -> None:
        me = threading.get_ident()
        self._taken.remove(next((one for one in self._taken if one[0] == me), self._taken[0]))


def slots_of(handler: Handler) -> Slots:
    """The slots of `handler` in this process, shared by all threads; without a `concurrency` there are always enough."""
    if handler.concurrency is None:
        return UNLIMITED
    slots = _slots.setdefault(handler.name, Slots(handler.concurrency))
    # Runs that began under another `concurrency` still have their slots.
    slots.count = handler.concurrency
    return slots


def limited_by_default(handlers: Sequence[Handler], threads: int) -> list[Handler]:
    """The handlers of a process with so many threads, each with a `concurrency` that the process can reach."""
    is_only_one = sum(handler.kind.is_called for handler in handlers) == 1
    count = threads if is_only_one else max(threads - 1, 1)
    return [replace(handler, concurrency=min(handler.concurrency or count, threads)) for handler in handlers]


def occupied(limit: timedelta) -> dict[str, tuple[float, float, int]]:
    """By handler whose slots have all been taken for longer than `limit`: how many, for how many seconds, and a thread."""
    found = {name: (slots.count, slots.all_taken_for()) for name, slots in [*_slots.items()]}
    return {name: (count, *held) for name, (count, held) in found.items() if held and held[0] >= limit.total_seconds()}


UNLIMITED = Slots(inf)
_slots: dict[str, Slots] = {}
