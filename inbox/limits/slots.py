"""How many threads of this process run one handler at a time: its `concurrency`.

A thread that runs a message of such a handler holds one of its slots, for deliveries and stored messages alike. Both kinds get
slots in turn; otherwise stored messages would wait as long as deliveries arrive. So after the runner has found no free slot for
a stored message, a slot that a delivery used is not given to another delivery until the runner has polled again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from inbox.handlers.handler import Handler
from outbox.kernel.clock import monotonic

_RESERVED_SECONDS = 0.2
"""The longest reservation for the runner. It may be unable to poll, because its database is unavailable."""


class Slots:
    """The slots of one handler. Shared by all threads of this process; see `slots_of`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._lock = threading.Lock()
        self._taken = 0
        self._was_for_delivery = False
        self._wake_runner: Callable[[], object] | None = None
        self._reserved_until = 0.0

    @property
    def is_free(self) -> bool:
        """May a worker take one now, for deliveries?"""
        is_reserved = self._was_for_delivery and self._wake_runner and monotonic() < self._reserved_until
        return self._taken < self.count and not is_reserved

    def take(self) -> bool:
        """Take one for deliveries."""
        with self._lock:
            if not self.is_free:
                return False
            self._taken += 1
            self._was_for_delivery = True
            return True

    def take_for_stored(self, wake: Callable[[], object]) -> bool:
        """Take one before polling for a stored message. If none is free, call `wake` once one is; it must not raise."""
        with self._lock:
            if self._taken >= self.count:
                self._wake_runner = wake
                return False
            self._wake_runner = None
            self._taken += 1
            return True

    def give_back(self) -> None:
        """Return a slot taken by `take_for_stored`: no message is due."""
        with self._lock:
            self._taken -= 1
            self._wake_runner = None

    def begin_stored(self) -> None:
        """Use a slot taken by `take_for_stored`: a message is run."""
        self._was_for_delivery = False

    def leave(self) -> None:
        """Free the slot after the run."""
        with self._lock:
            self._taken -= 1
            wake = self._wake_runner
            self._reserved_until = monotonic() + _RESERVED_SECONDS
        if wake is not None:
            wake()


def slots_of(handler: Handler) -> Slots | None:
    """The slots of `handler` in this process, shared by all threads; None if it may use all threads."""
    if handler.concurrency is None:
        return None
    with _registering:
        slots = _slots.setdefault(handler.name, Slots(handler.concurrency))
        # Runs that began under another `concurrency` still have their slots.
        slots.count = handler.concurrency
        return slots


_registering = threading.Lock()
_slots: dict[str, Slots] = {}
