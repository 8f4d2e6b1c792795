"""Crash quarantine: each process runs messages that may have ended their process one at a time.

If an attempt began and never ended, its message ended the process, or another one that ran at the same time did. If they ran
together again, all of them would run out of attempts. So a process runs only one such message at a time. Any message that runs
concurrently when the process ends loses an attempt, and is quarantined next.
"""

from __future__ import annotations

import threading

from inbox.models import InboxMessage, State


def is_quarantined(claimed: InboxMessage) -> bool:
    """Did an attempt before the claimed one never end?"""
    return claimed.attempts > 1 and claimed.state in {State.RECEIVED, State.RUNNING}


class OneAtATime:
    """The thread of this process that runs a quarantined message, if any."""

    def __init__(self) -> None:
        self._free = threading.Lock()
        self._owner: int | None = None

    def take(self) -> bool:
        """May this thread run one? If so, no other thread may until it calls `leave`."""
        self.leave()
        if not self._free.acquire(blocking=False):
            return False
        self._owner = threading.get_ident()
        return True

    def leave(self) -> None:
        """This thread runs none now."""
        if self._owner == threading.get_ident():
            self._owner = None
            self._free.release()


quarantine = OneAtATime()
