"""Limit the log lines about a lasting condition: one at once, then one a minute."""

from __future__ import annotations

import threading
from math import inf

from exactly_once.process.clock import monotonic

_SECONDS = 60.0


class Reminder:
    """The limit for one event, shared by all loops of a process that may report it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reminded_at = -inf

    def is_due(self) -> bool:
        """Is it time to report it? The caller that gets True must report it."""
        with self._lock:
            now = monotonic()
            if now - self._reminded_at < _SECONDS:
                return False
            self._reminded_at = now
            return True
