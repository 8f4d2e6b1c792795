"""The timer: makes scheduled messages ready at their time, to within a few milliseconds.

A timing wheel holds the messages that are due within the *horizon*; it is a cache of the database. When the wheel reports a
message as due, a guarded UPDATE checks the database's clock again and makes the message ready. So with any content of the
wheel, no message is early, made ready twice, or lost:

- The UPDATE does not change a message that was cancelled, rescheduled or sent meanwhile.
- If this process is killed or frozen, or its clock is wrong, another process fills its own wheel from the table.
- If the database's clock steps back, the UPDATE changes nothing until the clock reaches that instant again. If it steps
  forward, the next *sweep* finds the skipped messages: it reads overdue messages that are not in the wheel.

On PostgreSQL one process holds a lease and turns the wheel, so that each message is read once, not once per relay. The lease
only saves work: two processes that turn the wheel do not disturb each other.

A burst, half a million messages due in one second, must neither flood the relays nor hide other topics. So the number of
messages per topic in the wheel is limited, due topics are served in turn, and no more messages are made ready than the relays
need for a few passes.
"""

import math
from collections.abc import Callable, Collection
from datetime import timedelta

from django.db import connections

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.process.loop import Bell, StopRequest, Watchdog
from exactly_once.process.outage import Outage, OutageLog
from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.turns import Turns
from exactly_once.upkeep.loop_leases import TableLease
from outbox.conf import OutboxOptions
from outbox.relay.timetable import OF_A_TOPIC, Timetable
from outbox.store import scheduling
from outbox.store.unwritable_rows import UnwritableRows

logger = escaping_logger(__name__)

_LEASE = timedelta(seconds=3)
_RENEW_SECONDS = 2.0
_LOAD_AHEAD_SECONDS = 1.0
_PASSES_IN_HAND = 2
_PASSES_AHEAD = 8
"""When no more messages are ready than _PASSES_IN_HAND passes take, the timer makes more ready, up to this many passes. Relays
take lower positions first, so a constantly refilled level would starve higher positions."""
_SHORTEST_ROOM_SECONDS = 0.01
_LONGEST_ROOM_SECONDS = 0.1
_UNEXPECTED = "Unexpected error in the timer of %r; it starts again with an empty wheel."
_CATCH_UP_SECONDS = 0.05
"""Delay from a ring to the query for newly scheduled messages, so that many rings cause one query."""
_OVERDUE = timedelta(seconds=0.2)
_SWEEP_SECONDS = 1.0
_SWEEPING_SHARE = 20
"""Sweeping and catching up each take at most one part in this many of the time (1/20)."""
_SWEEPING_ALL_SHARE = 100
"""The same for sweeps of all overdue messages. Such a sweep passes over the dead versions of all messages that were made ready
since the last vacuum, and no message is made ready meanwhile."""


class Timer:
    """Turns the wheel of one database.

    Args:
        ring: called when messages have become ready.
        database_log: reports outages; the loops of one process share it.
    """

    def __init__(
        self,
        alias: str,
        options: OutboxOptions,
        *,
        watchdog: Watchdog,
        ring: Callable[[], None],
        database_log: OutageLog | None = None,
    ) -> None:
        self.bell = Bell()
        self._alias = alias
        self._options = options
        self._watchdog = watchdog
        self._ring = ring
        # SQLite has one writer, so timers do not work side by side.
        self._lease = TableLease(alias, "outbox: timer") if is_postgresql(connections[alias]) else None
        self._holds = self._lease is None
        self._ask_for_lease_at = 0.0
        self._turns = Turns("timer", _UNEXPECTED, database=Outage("the database", log=database_log))
        self._unwritable = UnwritableRows(alias, "timer")
        self._forget()
        self._load_at = self._sweep_at = self._sweep_all_at = self._may_catch_up_at = self._quiet_at = 0.0
        self._catch_up_at = math.inf
        self._room = 0
        self._ask_for_room_at = 0.0
        self._room_seconds = _SHORTEST_ROOM_SECONDS

    def run(self, stop: StopRequest) -> None:
        """Turn the wheel until asked to stop. No error ends this loop."""
        try:
            while not stop:
                self._watchdog.beat()
                wait = self._turns.take(self._alias, self._turn, stop)
                if wait is None:
                    self._forget()
                elif self.bell.wait(wait, stop):
                    self._was_rung()
        finally:
            self._watchdog.leave()
            if self._lease is not None and self._holds:
                self._lease.release()
            connections[self._alias].close()

    def _was_rung(self) -> None:
        now = monotonic()
        self._catch_up_at = min(self._catch_up_at, max(now + _CATCH_UP_SECONDS, self._may_catch_up_at))
        # A sweep finds messages that were rescheduled to an earlier time.
        self._quiet_at = now + self._options.horizon.total_seconds() + _SWEEP_SECONDS
        self._sweep_at = min(self._sweep_at, now + _SWEEP_SECONDS)

    def _turn(self) -> float:
        """Do the work that is due; return the seconds until the next work."""
        if not self._is_mine():
            self._forget()
            return max(self._ask_for_lease_at - monotonic(), 0.0)
        now = monotonic()
        if now >= self._load_at:
            self._load()
        elif self._table.is_short:
            self._read_on(self._table.cut_topics)
        if now >= self._catch_up_at:
            self._catch_up()
        if now >= self._sweep_at:
            self._sweep()
        self._table.advance(monotonic())
        next_at = min(self._fire(), self._table.next_tick(), self._load_at, self._sweep_at, self._catch_up_at)
        return max(next_at - monotonic(), 0.0)

    def _is_mine(self) -> bool:
        if self._lease is not None and (now := monotonic()) >= self._ask_for_lease_at:
            self._holds = self._lease.take(_LEASE)
            self._ask_for_lease_at = now + (_RENEW_SECONDS if self._holds else _LEASE.total_seconds() / 3)
        return self._holds

    def _forget(self) -> None:
        """Discard the wheel; the next turn fills it again."""
        self._table = Timetable(slots=self._options.WHEEL.SLOTS, tick=self._options.WHEEL.TICK.total_seconds(), now=monotonic())
        self._load_at = self._sweep_at = 0.0

    def _load(self) -> None:
        """Load the messages that have come within the horizon."""
        self._read_on(scheduling.scheduled_topics(self._alias))
        horizon = self._options.horizon.total_seconds()
        # A message scheduled within the horizon rings the bell, so two loads miss no message between them.
        self._load_at = monotonic() + (horizon - _LOAD_AHEAD_SECONDS if self.bell.is_connected else horizon / 10)

    def _read_on(self, topics: Collection[str]) -> None:
        offsets = self._table.offsets(topics)
        self._table.read_on(scheduling.upcoming(self._alias, offsets, self._options.horizon), offsets, monotonic())

    def _catch_up(self) -> None:
        """Load messages that were scheduled within the part of the horizon that was already read."""
        began_at = monotonic()
        new = self._table.newest, self._table.missing
        # A part of the room, so that there is some for the next ones, which may be due sooner.
        most = min(OF_A_TOPIC, -(-self._table.room // 2))
        found = scheduling.newly_scheduled(self._alias, *new, _OVERDUE, self._options.horizon, most)
        now = monotonic()
        self._table.take(found, now)
        self._catch_up_at = math.inf
        self._may_catch_up_at = now + _SWEEPING_SHARE * (now - began_at)

    def _sweep(self) -> None:
        """Load overdue messages that are not in the wheel: committed late, rescheduled earlier, or skipped by a clock step.

        All of them, if that takes at most one part in `_SWEEPING_ALL_SHARE` of the time; otherwise mostly the recent ones.
        """
        began_at = monotonic()
        since = None if began_at >= self._sweep_all_at else self._options.horizon
        offsets = self._table.offsets_of_overdue(scheduling.scheduled_topics(self._alias))
        found = scheduling.upcoming(self._alias, offsets, -_OVERDUE, since=since)
        now = monotonic()
        if since is None:
            self._sweep_all_at = now + _SWEEPING_ALL_SHARE * (now - began_at)
        self._table.take_overdue(found, now)
        is_quiet = self.bell.is_connected and now >= self._quiet_at
        every = self._options.poll_seconds(connected=True) if is_quiet else _SWEEP_SECONDS
        self._sweep_at = now + max(every, _SWEEPING_SHARE * (now - began_at))

    def _fire(self) -> float:
        """Make due messages ready, as many as there is room for; return the instant of the next call."""
        batch, waiting = self._options.BATCH_SIZE, self._table.waiting
        if not waiting:
            return math.inf
        in_a_burst = waiting > batch
        if in_a_burst and not self._has_room():
            return self._ask_for_room_at
        due = self._table.next_due(min(batch, self._room) if in_a_burst else batch)
        fired = scheduling.fire(self._alias, due, self._unwritable)
        self._table.fired(due, fired)
        self._room -= min(len(fired), self._room)
        if fired:
            self._ring()
        return 0.0 if self._table.waiting else math.inf

    def _has_room(self) -> bool:
        """May more messages be made ready? The check is rare, because it counts the ready messages."""
        now = monotonic()
        if not self._room and now >= self._ask_for_room_at:
            batch = self._options.BATCH_SIZE
            enough = _PASSES_IN_HAND * batch
            ready = scheduling.count_secondary_ready(self._alias, enough + 1)
            if ready <= enough:
                self._room = _PASSES_AHEAD * batch - ready
            if ready <= enough / 2:
                self._room_seconds = max(self._room_seconds / 2, _SHORTEST_ROOM_SECONDS)
            elif ready > enough:
                self._room_seconds = min(self._room_seconds * 2, _LONGEST_ROOM_SECONDS)
            self._ask_for_room_at = now + self._room_seconds
        return self._room > 0
