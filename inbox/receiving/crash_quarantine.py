"""Crash quarantine: each process runs messages that may have ended their process one at a time.

If an attempt began and never ended, its message ended the process, or another one that ran at the same time did. If they ran
together again, all of them would run out of attempts. So a process runs only one such message at a time. Any message that runs
concurrently when the process ends loses an attempt, and is quarantined next.

A message is alone for `REDELIVERY_AFTER` at most, or one that hangs would stop all others. A run under a lease that did not end
because its process was asked to stop causes no quarantine.
"""

import threading
from datetime import timedelta

from exactly_once.process.clock import monotonic
from inbox.models import InboxMessage
from inbox.states import State


def is_quarantined(claimed: InboxMessage) -> bool:
    """Did an attempt before the claimed one never end?"""
    return claimed.attempts > 1 and claimed.state in {State.RECEIVED, State.RUNNING} and not claimed.stopping


class OneAtATime:
    """The thread of this process that runs a quarantined message, if any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._alone_until = 0.0

    def take(self, longest: timedelta) -> bool:
        """May this thread run one? If so, no other thread may until it calls `leave`, or `longest` has passed."""
        me, now = threading.get_ident(), monotonic()
        with self._lock:
            if self._owner not in {None, me} and now < self._alone_until:
                return False
            self._owner, self._alone_until = me, now + longest.total_seconds()
            return True

    def leave(self) -> None:
        """This thread runs none now."""
        with self._lock:
            if self._owner == threading.get_ident():
                self._owner = None


quarantine = OneAtATime()
