"""The relay's loop: reach the broker, make due rows ready, run a pass, rest when there is nothing to do.

Nothing here may end the loop but a stop request: an absent broker or database is waited for, and an error nobody foresaw is
logged and met with a pause.
"""

from __future__ import annotations

import logging

from django.db import DatabaseError, InterfaceError, connections

from outbox import store
from outbox.conf import OutboxOptions
from outbox.kernel.databases import drop_unusable_connections
from outbox.kernel.faults import is_collision, is_outage
from outbox.kernel.loop import StopRequest, Watchdog
from outbox.kernel.outage import Outage
from outbox.kernel.retry import Pause
from outbox.kernel.transport import BrokerUnavailable, Transport
from outbox.relay.passes import Pass, PassReport

logger = logging.getLogger(__name__)

_SHORTEST_REST_SECONDS = 0.01
_PROMOTED_PER_ROUND = 1000


class Relay:
    """Carries the messages of one database over one transport until asked to stop."""

    def __init__(
        self, alias: str, transport: Transport, options: OutboxOptions, *, stop: StopRequest, watchdog: Watchdog
    ) -> None:
        self._alias = alias
        self._transport = transport
        self._options = options
        self._stop = stop
        self._watchdog = watchdog
        self._pass = Pass(alias, transport, options)
        self._limit = options.BATCH_SIZE
        self._rest_seconds = _SHORTEST_REST_SECONDS
        self._broker = Outage("the broker")
        self._database = Outage("the database")
        self._trouble = Pause()
        self._waits_for = ""
        self._idle = False
        self.published = 0

    def run(self, *, drain: bool = False) -> None:
        """Relay until asked to stop or, with `drain`, until nothing is ready or due."""
        try:
            while not self._stop:
                self._watchdog.beat()
                report = self._round(drain=drain)
                if report is None:
                    continue
                if drain and self._idle:
                    break
                self._rest(report)
        finally:
            self._finish()

    def _round(self, *, drain: bool) -> PassReport | None:
        """One turn of the loop; None when it met an outage and has already waited.

        An error nobody foresaw is survived by a relay that runs for ever, and raised by one that drains.
        """
        try:
            self._transport.connect()
        except BrokerUnavailable as error:
            self._broker.wait(error, self._stop)
            return None
        try:
            drop_unusable_connections()
            promoted, report = 0, PassReport()
            if store.has_work(self._alias):
                promoted = store.promote_due(self._alias, _PROMOTED_PER_ROUND)
                report = self._pass.run(self._limit)
        except Exception as error:
            connections[self._alias].close()
            if is_outage(error):
                self._database.wait(error, self._stop)
            elif is_collision(error):
                self._stop.wait(_SHORTEST_REST_SECONDS)
            else:
                if drain:
                    raise
                logger.exception("A pass failed in a way nobody foresaw; its messages stay ready.")
                self._transport.close()
                self._stop.wait(self._trouble.next_seconds())
            return None
        self._database.over()
        self._trouble.reset()
        self._note(report)
        self._idle = not (promoted or report.claimed or report.waits_for)
        return report

    def _note(self, report: PassReport) -> None:
        self.published += report.published
        culprit_found = report.suspicious and report.settled == report.claimed
        if report.suspicious:
            self._limit = 1
        elif report.broken is None:
            # After a message that broke the connection, grow again slowly: the one to blame ends up alone in its batch.
            self._limit = min(self._limit * 2, self._options.BATCH_SIZE)
        if report.broken is not None and not culprit_found:
            self._broker.wait(report.broken, self._stop)
        else:
            self._broker.over()
        if report.waits_for != self._waits_for:
            self._waits_for = report.waits_for
            if report.waits_for:
                logger.warning(
                    "SQLite takes one relay at a time and %s is it; this one waits until that one ends.",
                    report.waits_for,
                )

    def _rest(self, report: PassReport) -> None:
        if report.settled:
            self._rest_seconds = _SHORTEST_REST_SECONDS
            return
        self._transport.idle()
        self._stop.wait(self._rest_seconds)
        self._rest_seconds = min(self._rest_seconds * 2, self._options.POLL_INTERVAL.total_seconds())

    def _finish(self) -> None:
        if self._stop:
            logger.info("Stopping: finishing what is in hand. Signal again to end at once.")
        try:
            self._pass.close()
        except (DatabaseError, InterfaceError) as error:
            logger.debug("The lease was not released: %s", error)
        self._transport.close()
        if not connections[self._alias].in_atomic_block:  # as it is in a test
            connections[self._alias].close()
