"""Write the statistics of a web process, which sends no heartbeats: with a request, at most once a minute."""

from __future__ import annotations

import threading

from exactly_once.operators.minutes import MinuteWriter
from inbox.store import statistics

_lock = threading.Lock()
_writers: dict[str, MinuteWriter] = {}


def write_statistics(alias: str) -> None:
    """Write what this process has counted for a database, unless another thread is writing it."""
    if not _lock.acquire(blocking=False):
        return
    try:
        if alias not in _writers:
            _writers[alias] = statistics.writer(alias)
        _writers[alias].write_if_due()
    finally:
        _lock.release()
