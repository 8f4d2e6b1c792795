"""How many threads of this process run one handler at a time: its `concurrency`.

A thread that runs a message of such a handler holds one of its slots, for deliveries and stored messages alike. Both kinds get
slots in turn; otherwise stored messages would wait as long as deliveries arrive. So after the runner has found no free slot for
a stored message, a slot that a delivery had is not given to another delivery until the runner has looked again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from inbox.handlers.handler import Handler
from outbox.kernel.clock import monotonic

_RESERVED_SECONDS = 0.2
"""The runner may be unable to look, because its database is unavailable; deliveries do not wait for that."""


class Slots:
    """The slots of one handler. Shared by all threads of this process; see `slots_of`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._lock = threading.Lock()
        self._taken = 0
        self._was_for_delivery = False
        self._runner_looks: Callable[[], object] | None = None
        self._reserved_until = 0.0

    @property
    def is_free(self) -> bool:
        """May a worker take one now, for deliveries?"""
        is_reserved = self._was_for_delivery and self._runner_looks and monotonic() < self._reserved_until
        return self._taken < self.count and not is_reserved

    def take(self) -> bool:
        """Take one for deliveries."""
        with self._lock:
            if not self.is_free:
                return False
            self._taken += 1
            self._was_for_delivery = True
            return True

    def take_for_stored(self, look: Callable[[], object]) -> bool:
        """Take one to look for a stored message. If none is free, `look`, which must not raise, is called once one is."""
        with self._lock:
            if self._taken == self.count:
                self._runner_looks = look
                return False
            self._runner_looks = None
            self._taken += 1
            return True

    def give_back(self) -> None:
        """Return a slot taken to look for a stored message: there is none."""
        with self._lock:
            self._taken -= 1
            self._runner_looks = None

    def begin_stored(self) -> None:
        """Use a slot taken to look for a stored message: there is one."""
        self._was_for_delivery = False

    def leave(self) -> None:
        """Free the slot after the run."""
        with self._lock:
            self._taken -= 1
            look = self._runner_looks
            self._reserved_until = monotonic() + _RESERVED_SECONDS
        if look is not None:
            look()


def slots_of(handler: Handler) -> Slots | None:
    """The slots of `handler` in this process, shared by all threads; None if it may use all threads."""
    if handler.concurrency is None:
        return None
    with _registering:
        slots = _slots.get(handler.name)
        if slots is None or slots.count != handler.concurrency:
            slots = _slots[handler.name] = Slots(handler.concurrency)
        return slots


_registering = threading.Lock()
_slots: dict[str, Slots] = {}
