"""Messages that this process is handling in open transactions, so that it detects a concurrent duplicate at once.

Otherwise each duplicate would occupy a worker while it waits in the database for the end of the first delivery. If another
process is handling the message, that is known only after a timeout, and is then remembered for a short time.

The *crash quarantine*: each process runs messages that may have ended their process one at a time. If an attempt began and
never ended, its message ended the process, or another one that ran at the same time did. If they ran together again, all of
them would run out of attempts. So a process runs only one such message at a time. Any message that runs concurrently when the
process ends loses an attempt, and is quarantined next. A message is alone for `REDELIVERY_AFTER` at most, or one that hangs
would stop all others. A run under a lease that did not end because its process was asked to stop causes no quarantine.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from exactly_once.process.clock import monotonic
from inbox.models import InboxMessage
from inbox.states import State
from inbox.store.message_rows import NewRow

_REMEMBERED_WAITS = 5
"""A multiple of the wait, so that duplicates of one message occupy a worker for at most a sixth of its time."""

_EXCUSED_LOSSES = 2
_MOST_SUSPECTS = 1_000

Name = tuple[str, str, str]
"""Handler, topic and biz-id."""


def _name(row: NewRow | InboxMessage) -> Name:
    return row.handler, row.topic, row.biz_id


class InHand:
    """Called by all worker threads of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: Counter[Name] = Counter()
        self._after: defaultdict[Name, list[Callable[[], object]]] = defaultdict(list)
        self._elsewhere: dict[Name, float] = {}

    def take(self, rows: Iterable[NewRow]) -> set[Name] | None:
        """Hold these messages while they are handled, until `end` is called with the result. None: one of them is being handled
        by this process, or was recently found to be handled by another one.
        """
        names = {(row.handler, row.topic, row.biz_id) for row in rows}
        with self._lock:
            if not self._holders.keys().isdisjoint(names):
                return None
            if self._elsewhere and any(self._elsewhere.get(name, 0.0) > monotonic() for name in names):
                return None
            for name in names:
                self._holders[name] = 1
        return names

    def end(self, names: Iterable[Name]) -> None:
        """Their run has ended."""
        callbacks: list[Callable[[], object]] = []
        with self._lock:
            for name in names:
                self._holders[name] -= 1
                if not self._holders[name]:
                    del self._holders[name]
                    if self._after:
                        callbacks += self._after.pop(name, [])
        for callback in callbacks:
            callback()

    @contextmanager
    def running(self, first: InboxMessage) -> Iterator[Callable[[InboxMessage], None]]:
        """Handle this claimed stored message in the block, and each that the function gets, even if another thread holds it."""
        names = [(first.handler, first.topic, first.biz_id)]
        with self._lock:
            self._holders[names[0]] += 1

        def hold(stored: InboxMessage) -> None:
            name = (stored.handler, stored.topic, stored.biz_id)
            with self._lock:
                self._holders[name] += 1
            names.append(name)

        try:
            yield hold
        finally:
            self.end(names)

    def holds(self, row: NewRow) -> bool:
        """Is this process handling that message?"""
        return _name(row) in self._holders

    def after(self, row: NewRow, callback: Callable[[], object]) -> None:
        """If this process is handling that message, call `callback` at its end; `callback` must not raise."""
        with self._lock:
            if self.holds(row):
                self._after[_name(row)].append(callback)

    def remember_elsewhere(self, row: NewRow, waited: timedelta) -> None:
        """Record that another process is handling this message and did not end within `waited`."""
        now = monotonic()
        with self._lock:
            self._elsewhere = {name: until for name, until in self._elsewhere.items() if until > now}
            self._elsewhere[_name(row)] = now + _REMEMBERED_WAITS * waited.total_seconds()


in_hand = InHand()


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


class LostSessions:
    """How often this process has lost the session of a database inside the call of a message.

    The server may have been restarted, or the message has ended its session. So the first losses are excused, the message is
    counted before it is called again, and then each loss counts as an attempt.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: dict[Name, int] = {}

    def record(self, rows: Iterable[NewRow]) -> None:
        with self._lock:
            for row in rows:
                self.counts[_name(row)] = self.counts.pop(_name(row), 0) + 1
            for name in [*self.counts][:-_MOST_SUSPECTS]:
                del self.counts[name]

    def are_among(self, rows: Iterable[NewRow]) -> bool:
        """Was a session lost inside the call of one of these?"""
        return not self.counts.keys().isdisjoint(map(_name, rows))

    def count_against(self, row: NewRow | InboxMessage) -> bool:
        """Was the last loss one too many?"""
        return self.counts.get(_name(row), 0) > _EXCUSED_LOSSES


lost_sessions = LostSessions()
quarantine = OneAtATime()
