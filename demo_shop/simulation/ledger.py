"""What the simulated people did, recorded by their own threads afterwards.

The audit compares it with the tables: nothing in it is read from the outbox or the inbox.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum


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


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The numbers of orders so far, by what their customers did with them."""

    committed: frozenset[str]
    rolled_back: frozenset[str]
    taken_back: frozenset[str]
    rated: frozenset[str]


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
        self._committed: set[str] = set()
        self._rolled_back: set[str] = set()
        self._taken_back: set[str] = set()
        self._rated: set[str] = set()
        self._deeds: Counter[Deed] = Counter()

    def committed(self, number: str) -> None:
        with self._lock:
            self._committed.add(number)

    def rolled_back(self, number: str) -> None:
        with self._lock:
            self._rolled_back.add(number)

    def taken_back(self, number: str) -> None:
        with self._lock:
            self._taken_back.add(number)

    def rated(self, number: str) -> None:
        with self._lock:
            self._rated.add(number)

    def done(self, deed: Deed, times: int = 1) -> None:
        with self._lock:
            self._deeds[deed] += times

    def orders(self) -> Orders:
        with self._lock:
            return Orders(
                committed=frozenset(self._committed),
                rolled_back=frozenset(self._rolled_back),
                taken_back=frozenset(self._taken_back),
                rated=frozenset(self._rated),
            )

    def count(self, deed: Deed) -> int:
        with self._lock:
            return self._deeds[deed]
