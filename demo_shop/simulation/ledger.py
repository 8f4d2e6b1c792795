"""What the people in the demo did themselves, noted by their own hand after it was done.

It is the other side of the audit: nothing in it is read back from what the outbox or the inbox has written.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from enum import Enum


class Deed(Enum):
    """Something that is counted."""

    INJECTED = "injected"
    COPIED = "copied on the broker, which is one way to inject"
    REPEATED_CALL = "repeated call"
    FORGED_CALL = "forged call"
    CONTRADICTING_CALL = "contradicting call"
    REFUSED_CALL = "refused call"
    KILL = "kill"


class Ledger:
    """Shared by all threads of a run.

    Attributes:
        run: the name of the run, the beginning of its order numbers and products.
        news: what is worth a line on the screen, the latest last.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.news: deque[str] = deque(maxlen=1000)
        self._lock = threading.Lock()
        self._committed: set[str] = set()
        self._rolled_back: set[str] = set()
        self._deeds: Counter[Deed] = Counter()

    def committed(self, number: str) -> None:
        with self._lock:
            self._committed.add(number)

    def rolled_back(self, number: str) -> None:
        with self._lock:
            self._rolled_back.add(number)

    def done(self, deed: Deed, times: int = 1) -> None:
        with self._lock:
            self._deeds[deed] += times

    def orders(self) -> tuple[frozenset[str], frozenset[str]]:
        """The numbers of committed and of rolled back orders so far."""
        with self._lock:
            return frozenset(self._committed), frozenset(self._rolled_back)

    def count(self, deed: Deed) -> int:
        with self._lock:
            return self._deeds[deed]
