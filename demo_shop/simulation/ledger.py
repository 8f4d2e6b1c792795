"""What the simulated people did, recorded by their own threads afterwards.

The audit compares it with the tables: nothing in it is read from the outbox or the inbox.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from enum import Enum


class Fate(Enum):
    """What a customer did with an order. One that was taken back or rated was committed before."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    TAKEN_BACK = "taken back"
    RATED = "rated"


class Deed(Enum):
    """Something that is counted."""

    INJECTED = "injected"
    COPIED = "copied on the broker, which is one way to inject"
    REPEATED_CALL = "repeated call"
    FORGED_CALL = "forged call"
    CONTRADICTING_CALL = "contradicting call"
    REFUSED_CALL = "refused call"
    TOO_LATE = "came too late to take an order back"
    KILL = "kill"


class Ledger:
    """Shared by all threads of a run.

    Attributes:
        run: the name of the run, the beginning of its order numbers and products.
        news: lines for the screen, the latest last.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.news: deque[str] = deque(maxlen=1000)
        self._lock = threading.Lock()
        self._orders: dict[Fate, set[str]] = {fate: set() for fate in Fate}
        self._deeds: Counter[Deed] = Counter()

    def record(self, fate: Fate, number: str) -> None:
        with self._lock:
            self._orders[fate].add(number)

    def orders(self, fate: Fate) -> frozenset[str]:
        """The numbers of the orders so far."""
        with self._lock:
            return frozenset(self._orders[fate])

    def done(self, deed: Deed, times: int = 1) -> None:
        with self._lock:
            self._deeds[deed] += times

    def count(self, deed: Deed) -> int:
        with self._lock:
            return self._deeds[deed]
