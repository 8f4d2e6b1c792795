"""Making `waiting` messages ready: a walk along the held keys, a part of them at a time.

All lanes of a process share one walk. A topic that an operator has paused may hold a million keys, and no other message waits
until all of them have been looked at.
"""

import math
from threading import Lock

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import Reminder
from outbox.store import settling
from outbox.store.unwritable_rows import UnwritableRows

_KEYS = 1000
_MADE_READY = 2000
_SECONDS = 0.2
_SHORTEST_SECONDS = 0.01
_SHARE = 20
"""Steps that find no key to release take at most one part in this many of the time (1/20)."""
_MOST_REPEATED = 10
"""A step that released something is repeated up to this many times, because a key has more messages than one step releases."""


class Release:
    """The walk of one process.

    Args:
        reminder: decides when to report unwritable rows.
    """

    def __init__(self, alias: str, reminder: Reminder) -> None:
        self._alias = alias
        self._unwritable = UnwritableRows(alias, reminder=reminder)
        self._lock = Lock()
        self._reached = ""
        self._repeated = 0
        self._due_at = self._not_before = 0.0

    def expect(self) -> None:
        """A message was settled or made ready, and may have blocked others until now."""
        self._due_at = max(min(self._due_at, monotonic() + _SECONDS), self._not_before)

    def seconds_left(self) -> float:
        """Seconds until the next step of a walk that has begun; infinite between two walks."""
        return max(self._due_at - monotonic(), 0.0) if self._reached else math.inf

    def step(self, idle_seconds: float) -> int:
        """The next step if it is due and no other lane is in one; the number of messages that it made ready.

        Args:
            idle_seconds: time from a walk that found none to the next one.
        """
        if monotonic() < self._due_at or not self._lock.acquire(blocking=False):
            return 0
        try:
            return self._step(idle_seconds)
        finally:
            self._lock.release()

    def walk(self) -> int:
        """Walk until messages become ready, or all keys have been looked at; their number."""
        with self._lock:
            self._reached = ""
            while not (released := self._step(0.0)) and self._reached:
                pass
        return released

    def _step(self, idle_seconds: float) -> int:
        begun_at = monotonic()
        released, reached = settling.release_waiting(
            self._alias, self._reached, keys=_KEYS, most=_MADE_READY, unwritable=self._unwritable
        )
        self._repeated = self._repeated + 1 if released and self._repeated < _MOST_REPEATED else 0
        if not self._repeated:
            self._reached = reached
        now = monotonic()
        pause = _SHARE * (now - begun_at) if reached else max(_SECONDS, idle_seconds, _SHARE * (now - begun_at))
        self._due_at = now + (_SHORTEST_SECONDS if released else pause)
        self._not_before = self._due_at if released or reached else 0.0
        return released
