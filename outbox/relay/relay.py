"""The relay's loop: reach the broker, look, run a pass, make rested and waiting rows ready, rest when there is nothing to do.

Nothing here may end the loop but a stop request: an absent broker or database is waited for, and an unexpected error is
logged and met with a pause.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from functools import partial

from django.db import DatabaseError, InterfaceError, connections

from outbox.conf import OutboxOptions
from outbox.database.connections import drop_unusable_connections
from outbox.database.faults import is_canceled, is_collision, is_lock_timeout, is_outage, why_unavailable
from outbox.database.schema import is_missing, report_missing
from outbox.doorbell import ALERT_SECONDS
from outbox.kernel.broker import REFUSAL_REMEDY
from outbox.kernel.clock import monotonic
from outbox.kernel.loop import Bell, StopRequest, Watchdog
from outbox.kernel.masking import masked
from outbox.kernel.outage import Outage
from outbox.kernel.reminder import Reminder
from outbox.kernel.retry import Pause
from outbox.kernel.transport import BrokerRefused, BrokerUnavailable, Transport
from outbox.models import SHARDS
from outbox.relay.attending import Attendant
from outbox.relay.batch_size import BatchSize
from outbox.relay.floors import Floors
from outbox.relay.heartbeat import Heartbeat
from outbox.relay.passes import Pass, PassReport
from outbox.relay.share import Share
from outbox.relay.stuck_rows import StuckRows
from outbox.store import claiming, settling

logger = logging.getLogger(__name__)

_SHORTEST_POLL_SECONDS = 0.01
_LONGEST_CONTENDED_SECONDS = 0.1
_PROMOTED_PER_ROUND = 1000
_KEYS_RELEASED_PER_ROUND = 200
_RELEASED_AT_ONCE = 100
_RELEASE_SECONDS = 0.2
_BESIDE_STUCK_SECONDS = 1.0
_RELEASING_SHARE = 20
"""Looking in vain for keys to release takes at most one part in this many of the time."""


class Relay:
    """Carries the messages of one database, or of some of its shards, over one transport until asked to stop.

    Args:
        timed: a timer beside it makes ready what was scheduled; without one the relay does it, less exactly.
        refusals: says when to report that the broker refuses this service; relays of one process share it.
        errors: says when to report an unexpected error; relays of one process share it.
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
        refusals: Reminder | None = None,
        errors: Reminder | None = None,
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
        self._pass = Pass(alias, transport, options)
        self._shards = tuple(shards)
        self._timed = timed
        stuck_rows = partial(StuckRows, alias, "relay", Reminder())
        self._stuck_retrying, self._stuck_scheduled, self._stuck_waiting = stuck_rows(), stuck_rows(), stuck_rows()
        self._floors = Floors(self._shards, partial(claiming.writers, alias))
        self._share = Share(len(self._shards))
        self._release_at = 0.0
        self._more: Sequence[claiming.Busy] = ()
        self._size = BatchSize(options.BATCH_SIZE)
        self._poll_seconds = _SHORTEST_POLL_SECONDS
        self._alert_until = 0.0
        self._broker = Outage("the broker")
        self._refusals = refusals or Reminder()
        self._errors = errors or Reminder()
        self._database = Outage("the database")
        self._trouble = Pause()
        self._contended = Pause(first_seconds=_SHORTEST_POLL_SECONDS / 2, cap_seconds=_LONGEST_CONTENDED_SECONDS)
        self._waits_for = ""
        self._running = False
        self._retry_in = math.inf
        self._moved = 0
        self._idle = False
        self.published = 0

    def run(self, *, drain: bool = False) -> bool:
        """Relay until asked to stop or, with `drain`, until nothing is ready or due. Was there anything to do?"""
        worked = False
        self._running = True
        try:
            while not self._stop:
                self._watchdog.beat()
                if not self._database.ongoing:
                    self._heartbeat.beat()
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
        """Does it go round, and reach both the database and the broker?"""
        return self._running and not self._broker.ongoing and not self._database.ongoing

    def _round(self, *, drain: bool) -> PassReport | None:
        """One turn of the loop; None when it met an outage and has already waited.

        An unexpected error is survived by a relay that runs for ever, and raised by one that drains.
        """
        try:
            self._transport.connect()
        except BrokerUnavailable as error:
            self._wait_for_broker(str(error), refused=isinstance(error, BrokerRefused))
            return None
        try:
            drop_unusable_connections()
            if self._database.ongoing:
                claiming.require_writable(self._alias)
            report = self._work(drain=drain)
        except Exception as error:
            connections[self._alias].close()
            if is_outage(error):
                self._floors.forget()
                self._heartbeat.waits_for("the database")
                self._database.wait(why_unavailable(error, self._alias), self._stop)
            elif is_collision(error):
                if is_lock_timeout(error):
                    self._pass.contention.timed_out()
                self._stop.wait(_SHORTEST_POLL_SECONDS)
            elif is_canceled(error) and self._size.now > 1:
                self._size.overdue(error)
            elif is_missing(error) and not drain:
                self._heartbeat.waits_for("the database, which is not migrated")
                self._heartbeat.beat()
                report_missing(error)
                self._stop.wait(self._database.enter())
            else:
                if drain:
                    raise
                self._survive(error)
            return None
        self._database.over()
        self._trouble.reset()
        self._record(report)
        in_other_hands = report.refused or report.skipped or report.waits_for
        self._idle = not (self._retry_in <= 0 or self._moved or report.claimed or in_other_hands)
        return report

    def _survive(self, error: Exception) -> None:
        """An unexpected error: report it, and pause."""
        if self._errors.is_due():
            logger.error(
                "Unexpected error in the relay: a pass over %r failed. Its messages stay ready.", self._alias, exc_info=error
            )
        if not self._pass.unsettled.is_doubtful:  # else nothing is sent that could not be settled
            self._size.failed()
        self._transport.close()
        self._stop.wait(self._trouble.next_seconds())

    def _work(self, *, drain: bool) -> PassReport:
        """Look; run a pass over what is ready; make ready what is to be retried, is due, or is no longer held."""
        if self._more:
            busy, self._more = self._more, ()
            self._moved = 0
            report = self._run_pass(busy)
            self._pass.topics.store()
            return report
        # A relay beside this one that cannot reach the broker leaves its shards to us.
        among = self._shards if all(sibling.is_working for sibling in self.siblings) else range(SHARDS)
        sight = claiming.look(self._alias, self._floors.now, among, from_the_start=self._floors.begin())
        self._floors.end(sight)
        topics = self._pass.topics
        topics.update(sight.paused)
        report = self._run_pass(sight.busy) if sight.busy else PassReport()
        topics.store()
        # A full pass has left more in the same shards, which the next pass need not look for.
        self._more = sight.busy if report.published == self._size.now else ()
        # Rows that are due and are not promoted are in the hands of another relay that promotes them.
        self._retry_in, self._moved = sight.retry_in, 0
        if sight.retry_in <= 0:
            self._moved = settling.promote_rested(self._alias, _PROMOTED_PER_ROUND, self._stuck_retrying)
            if self._stuck_retrying and not self._moved:
                self._retry_in = _BESIDE_STUCK_SECONDS  # those hide when the next one is due
        if not self._timed:
            self._moved += settling.promote_due(self._alias, _PROMOTED_PER_ROUND, self._stuck_scheduled)
        if monotonic() >= self._release_at or (drain and not report.settled):
            self._moved += self._release()
        if made_ready := topics.make_ready(self._size.now // 2):
            self._moved += made_ready
            for sibling in self.siblings:
                sibling.bell.ring()  # some of them are in its shards
        return report

    def _run_pass(self, busy: Sequence[claiming.Busy]) -> PassReport:
        wanted = self._share.of(busy)
        # Each shard costs at least the reading of one row.
        report = self._pass.run(wanted[: self._size.now] if self._size.is_reduced else wanted, self._size.now)
        self._share.record(report.refused)
        self._floors.saw(report.highest)
        return report

    def _release(self) -> int:
        begun_at = monotonic()
        released = settling.release_waiting(
            self._alias, keys=_KEYS_RELEASED_PER_ROUND, each=_RELEASED_AT_ONCE, refused=self._stuck_waiting
        )
        now = monotonic()
        in_vain = max(_RELEASE_SECONDS, 2 * self._poll_seconds, _RELEASING_SHARE * (now - begun_at))
        self._release_at = now + (_SHORTEST_POLL_SECONDS if released else in_vain)
        return released

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
        self._heartbeat.waits_for(report.waits_for and f"the lease held by {report.waits_for}")
        if not report.waits_for:
            self._heartbeat.passed()
        elif report.waits_for != self._waits_for:
            logger.warning(
                "SQLite takes one relay at a time and %s is it; this one waits until that one ends.", report.waits_for
            )
            self._waits_for = report.waits_for

    def _wait_for_broker(self, reason: str, *, refused: bool = False) -> None:
        self._heartbeat.waits_for(f"the broker: {reason}")
        if not self._database.ongoing:
            self._heartbeat.beat()
        if not self._broker.ongoing:
            for sibling in self.siblings:
                sibling.bell.ring()  # it takes over our shards
        if not refused:
            self._broker.wait(reason, self._stop)
            return
        if self._refusals.is_due():
            shown = masked(self._options.BROKER_URL)
            logger.error('The broker refuses OUTBOX["BROKER_URL"], %s: %s. %s', shown, reason, REFUSAL_REMEDY)
        self._stop.wait(self._broker.enter())

    def _wait(self, report: PassReport) -> None:
        is_contended = bool(report.refused or report.skipped or report.unsettled)
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
        if report.locked:
            return  # what lies behind them is read next
        # Another relay ends its pass in a moment. A transaction of another kind may hold a shard, or a row, for long.
        wait = self._contended.next_seconds() if is_contended else min(self._poll_seconds, self._retry_in)
        if self.bell.wait(min(wait, max(self._pass.topics.seconds_left(), _SHORTEST_POLL_SECONDS)), self._stop):
            self._be_alert()
        elif monotonic() > self._alert_until:
            self._poll_seconds = min(self._poll_seconds * 2, self._options.poll_seconds(connected=self.bell.is_connected))

    def _be_alert(self) -> None:
        """Something came; more may, and the publisher's next ring may be withheld."""
        now = monotonic()
        self._poll_seconds = _SHORTEST_POLL_SECONDS
        self._alert_until = now + ALERT_SECONDS
        self._release_at = min(self._release_at, now + _RELEASE_SECONDS)

    def _finish(self) -> None:
        self._running = False
        self._watchdog.leave()
        if self._stop:
            logger.info("Stopping: finishing what is in hand. Signal again to end at once.")
        try:
            self._pass.close()
        except (DatabaseError, InterfaceError) as error:
            logger.debug("The lease was not released: %s", error)
        self._transport.close()
        if not connections[self._alias].in_atomic_block:  # as it is in a test
            connections[self._alias].close()
