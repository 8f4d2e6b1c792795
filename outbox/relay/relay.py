"""The relay's loop: connect to the broker, find work, run a pass, make retrying and waiting messages ready, wait if idle.

Only a stop request ends the loop. It waits for an unavailable broker or database. After an unexpected error, which it logs, it
pauses and continues.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial

from django.db import connections

from exactly_once.process import work
from exactly_once.process.clock import monotonic
from exactly_once.process.logs import Reminder, escaping_logger
from exactly_once.process.loop import Bell, StopRequest, Watchdog
from exactly_once.process.outage import Outage, OutageLog, wait_for_broker
from exactly_once.sql.faults import is_lock_timeout
from exactly_once.sql.turns import Fault, Turns
from exactly_once.transport.interface import BrokerRefused, BrokerUnavailable, Transport
from exactly_once.wire.retry import Pause
from outbox.conf import OutboxOptions
from outbox.doorbell import ALERT_SECONDS
from outbox.models import SHARDS
from outbox.relay.attending import Attendant
from outbox.relay.floors import Floors
from outbox.relay.heartbeat import Heartbeat
from outbox.relay.pass_size import BatchSize, Share
from outbox.relay.passes import Pass, PassReport
from outbox.relay.releasing import Release
from outbox.store import looking, settling
from outbox.store.dialect import EVER
from outbox.store.set_aside import Reason
from outbox.store.unwritable_rows import UnwritableRows

logger = escaping_logger(__name__)

_SHORTEST_POLL_SECONDS = 0.01
_LONGEST_CONTENDED_SECONDS = 0.1
_MADE_READY_PER_ROUND = 1000
_BESIDE_STUCK_SECONDS = 1.0
_PAUSED_SECONDS = 0.2


class Relay:
    """Relays the messages of one database, or of some of its shards, over one transport until asked to stop.

    Args:
        timed: a timer beside the relay makes scheduled messages ready; without one the relay does so, less exactly.
        broker_log, database_log: report outages; the loops of one process share them.
        errors: decides when to report an unexpected error; the relays of one process share it.
        release: makes waiting messages ready; the relays of one process share it.
    """

    def __init__(
        self,
        alias: str,
        transport: Transport,
        options: OutboxOptions,
        *,
        stop: StopRequest,
        watchdog: Watchdog,
        heartbeat: Heartbeat,
        shards: Iterable[int] = range(SHARDS),
        timed: bool = False,
        broker_log: OutageLog | None = None,
        database_log: OutageLog | None = None,
        errors: Reminder | None = None,
        release: Release | None = None,
    ) -> None:
        self.bell = Bell()
        self.siblings: Sequence[Relay] = ()
        self.callers: Sequence[Attendant] = ()
        self._alias = alias
        self._transport = transport
        self._options = options
        self._stop = stop
        self._watchdog = watchdog
        self._heartbeat = heartbeat
        self._pass = Pass(alias, transport, options, heartbeat.tally)
        self._shards = tuple(shards)
        self._timed = timed
        reminder = Reminder()
        self._retrying, self._scheduled = (UnwritableRows(alias, reminder=reminder) for _ in range(2))
        self._release = release or Release(alias, reminder)
        self._floors = Floors(self._shards, partial(looking.writers, alias))
        self._share = Share(len(self._shards))
        self._more: Sequence[looking.BusyShard] = ()
        self._size = BatchSize(options.BATCH_SIZE)
        self._poll_seconds = _SHORTEST_POLL_SECONDS
        self._alert_until = 0.0
        self._broker = Outage("the broker", log=broker_log)
        self._database = Outage("the database", log=database_log)
        unexpected = "Unexpected error in the relay: a pass over %r failed. Its messages stay ready."
        self._turns = Turns("relay", unexpected, database=self._database, errors=errors, on_fault=self._on_fault)
        self._contended = Pause(first_seconds=_SHORTEST_POLL_SECONDS / 2, cap_seconds=_LONGEST_CONTENDED_SECONDS)
        self._running = self._drains = False
        self._retry_in = math.inf
        self._retries_since = EVER
        self._moved = 0
        self._idle = False
        self.published = 0

    def run(self, *, drain: bool = False) -> bool:
        """Relay until asked to stop or, with `drain`, until nothing is ready or due; return whether there was any work."""
        worked = False
        self._running, self._drains = True, drain
        try:
            while not self._stop:
                self._watchdog.beat()
                if self._stop.is_paused or not self._database.ongoing:
                    self._heartbeat.beat()
                if self._stop.is_paused and not drain:
                    self._be_paused()
                    continue
                self._running = True
                report = self._round(drain=drain)
                if report is None:
                    continue
                if drain and self._idle:
                    break
                worked |= not self._idle
                self._wait(report)
        finally:
            self._finish()
        return worked

    @property
    def is_working(self) -> bool:
        """Is the loop running, with both the database and the broker available?"""
        return self._running and not self._broker.ongoing and not self._database.ongoing

    def _be_paused(self) -> None:
        """While an operator has paused this process, claim nothing, and hold no broker connection."""
        if self._running:
            self._running = False
            self._heartbeat.waits_for("")
            self._transport.close()
        self._stop.wait(_PAUSED_SECONDS)

    def _round(self, *, drain: bool) -> PassReport | None:
        """Do one turn of the loop. If it fails, wait as the error requires and return None.

        An unexpected error is logged, or raised with `drain`.
        """
        try:
            self._transport.connect()
        except BrokerUnavailable as error:
            self._wait_for_broker(str(error), refused=isinstance(error, BrokerRefused))
            return None
        report = self._turns.take(self._alias, partial(self._work, drain=drain), self._stop, raising=drain)
        if report is None:
            return None
        self._record(report)
        is_held_elsewhere = report.locked_shards or report.aside.total() > report.aside[Reason.UNWRITABLE]
        self._idle = not (self._retry_in <= 0 or self._moved or report.claimed or is_held_elsewhere)
        return report

    def _on_fault(self, fault: Fault, error: Exception) -> bool:
        """Prepare the next pass for what made this one fail. True: it can begin at once."""
        if fault is Fault.OUTAGE:
            self._floors.forget()
            self._size.failed()  # the connection may have been too slow for the batch
            self._heartbeat.waits_for("the database")
        elif fault is Fault.MISSING:
            self._heartbeat.waits_for("the database, which is not migrated")
            self._heartbeat.beat()
        elif fault is Fault.COLLISION:
            if is_lock_timeout(error):
                self._pass.contention.timed_out()
        elif fault is Fault.CANCELED and self._size.now > 1:
            self._size.overdue(error)
            return True
        else:
            self._size.failed()
            self._transport.close()
        return False

    def _work(self, *, drain: bool) -> PassReport:
        """Find work; run a pass over it; make messages ready that are to be retried, are due, or are no longer held back."""
        if self._database.ongoing:
            looking.require_writable(self._alias)
        if self._more:
            shards, self._more = self._more, ()
            self._moved = 0
            report = self._run_pass(shards)
            self._pass.topics.store()
            return report
        # While a sibling does not work, this relay takes its shards, too.
        among = self._shards if all(sibling.is_working for sibling in self.siblings) else range(SHARDS)
        found = looking.look(self._alias, self._floors.now, among, self._retries_since, from_the_start=self._floors.begin())
        self._floors.end(found)
        topics = self._pass.topics
        topics.update(found.paused)
        self._pass.take_news()
        report = self._run_pass(found.shards) if found.shards else PassReport()
        topics.store()
        # After a full pass the same shards have more messages, so the next pass needs no query for shards.
        self._more = found.shards if report.has_more else ()
        self._retry_in, self._retries_since, self._moved = found.retry_in, found.retries_since, 0
        if found.retry_in <= 0:
            self._moved = settling.make_retrying_ready(self._alias, _MADE_READY_PER_ROUND, self._retrying, self._retries_since)
            if not self._moved:
                # Another session has locked them, or the database refuses to change them. They hide when the next one is due.
                self._retry_in = _BESIDE_STUCK_SECONDS
        if not self._timed:
            self._moved += settling.make_scheduled_ready(self._alias, _MADE_READY_PER_ROUND, self._scheduled)
        is_last = drain and not report.settled
        self._moved += self._release.walk() if is_last else self._release.step(2 * self._poll_seconds)
        if made_ready := topics.make_ready(self._size.now // 2):
            self._moved += made_ready
            for sibling in self.siblings:
                sibling.bell.ring()  # some of them are in its shards
        return report

    def _run_pass(self, shards: Sequence[looking.BusyShard]) -> PassReport:
        wanted, limit = self._share.of(shards), self._size.now
        # A pass reads at least one row of each shard.
        before = work.begin("outbox", self._alias, "")
        try:
            report = self._pass.run(wanted[:limit] if limit < self._options.BATCH_SIZE else wanted, limit)
        finally:
            work.end(before)
        self._share.record(report.locked_shards)
        self._floors.saw(report.highest)
        return report

    def _record(self, report: PassReport) -> None:
        self.published += report.published
        self._heartbeat.published(report.published)
        if report.overdue:
            self._size.overdue("OUTBOX['BATCH_DEADLINE'] had passed when they were read")
        elif report.suspicious:
            self._size.failed()
        elif report.broken is None:
            self._size.succeeded()
        if report.broken is not None:
            self._wait_for_broker(report.broken)
            return
        self._broker.over()
        self._heartbeat.passed(shards=self._share.most, broker_seconds=self._transport.round_trip)

    def _wait_for_broker(self, reason: str, *, refused: bool = False) -> None:
        self._heartbeat.waits_for(f"the broker: {reason}", is_broker=True)
        if not self._database.ongoing:
            self._heartbeat.beat()
        if not self._broker.ongoing:
            for sibling in self.siblings:
                sibling.bell.ring()  # it takes over this relay's shards
        setting, url = 'OUTBOX["BROKER_URL"]', self._options.BROKER_URL
        wait_for_broker(self._broker, self._stop, reason, setting=setting, url=url, refused=refused, drain=self._drains)

    def _wait(self, report: PassReport) -> None:
        is_contended = bool(report.locked_shards or report.aside)
        if not is_contended:
            self._contended.reset()
        if report.settled:
            for caller in self.callers:
                caller.ring()
        if report.settled or self._moved:
            self._be_alert()
            if not report.published:
                self._transport.idle()
            return
        self._transport.idle()
        if report.locked_rows:
            return  # the next pass reads the messages after them
        # Another relay soon ends its pass. Any other transaction may hold a shard or a row for a long time.
        until = min(self._poll_seconds, self._retry_in, self._release.seconds_left())
        wait = self._contended.next_seconds() if is_contended else until
        if self.bell.wait(min(wait, max(self._pass.topics.seconds_left(), _SHORTEST_POLL_SECONDS)), self._stop):
            self._be_alert()
        elif monotonic() > self._alert_until:
            self._poll_seconds = min(self._poll_seconds * 2, self._options.poll_seconds(connected=self.bell.is_connected))

    def _be_alert(self) -> None:
        """Poll often for a moment, because more messages may follow and the publisher may withhold its next ring."""
        self._poll_seconds = _SHORTEST_POLL_SECONDS
        self._alert_until = monotonic() + ALERT_SECONDS
        self._release.expect()

    def _finish(self) -> None:
        self._running = False
        self._watchdog.leave()
        self._transport.close()
        if not connections[self._alias].in_atomic_block:  # as in a test
            connections[self._alias].close()
