"""Messages that may have ended their process are run one at a time in each process.

When an attempt was begun and has never ended, the message did that, or another one that was in hand at the same time. Begun
together again they would end together again, until the innocent are as dead as the guilty one. So each is run while this
process has no other such message in hand. What is in hand beside it loses an attempt, and is itself run like this next.
"""

from __future__ import annotations

import threading

from inbox.models import InboxMessage, State


def is_suspect(claimed: InboxMessage) -> bool:
    """Has an attempt before the one that is claimed now never ended?"""
    return claimed.attempts > 1 and claimed.state in {State.RECEIVED, State.RUNNING}


class OneAtATime:
    """Which thread of this process has a suspect in hand, if any has."""

    def __init__(self) -> None:
        self._free = threading.Lock()
        self._owner: int | None = None

    def take(self) -> bool:
        """May this thread take one in hand? If so, no other may until it calls `leave`."""
        self.leave()
        if not self._free.acquire(blocking=False):
            return False
        self._owner = threading.get_ident()
        return True

    def leave(self) -> None:
        """This thread has none in hand, or not any more."""
        if self._owner == threading.get_ident():
            self._owner = None
            self._free.release()


one_suspect = OneAtATime()
