"""The thread that owns the broker connection.

It receives, acknowledges and sends heartbeats, so that a long handler never loses the connection. The pool's threads run one
load each in the database. Deliveries go to them by their lanes (`subscriptions`) and answers come back (`answers`). A delivery
belongs to its channel: when that has ended, it is dropped, and so is its answer, because its delivery tag may now name another
message. Any error of the connection or of a channel closes the connection; the broker delivers again, and the inbox suppresses
the duplicates.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.process.loop import StopRequest, Watchdog
from exactly_once.process.outage import Outage, wait_for_broker
from exactly_once.transport.broker import (
    BROKER_FAILURES,
    BrokerConnection,
    connection_attempts,
    connection_options,
    dispatch_what_is_read,
    failures_of,
    is_refusal,
    read_in_chunks,
    speaks_amqp,
)
from exactly_once.wire.text import describe
from inbox.conf import InboxOptions
from inbox.consumer.answers import Answers
from inbox.consumer.heartbeat import Activity
from inbox.consumer.lanes import Lane
from inbox.consumer.pool import Pool
from inbox.consumer.reception import Reception
from inbox.consumer.runner import Runner
from inbox.consumer.subscriptions import Subscriptions
from inbox.consumer.topology import queues_of
from inbox.handlers.handler import Handler
from inbox.leases import renewal
from inbox.states import Outcome

logger = escaping_logger(__name__)

_TICK_SECONDS = 0.05
_BUSY_TICK_SECONDS = 0.005
_HOUSEKEEPING_SECONDS = 0.5
_POLL_SECONDS = 0.0001


class Consumer:
    """Receives messages for `handlers` until asked to stop; between deliveries its workers run stored messages."""

    def __init__(
        self,
        handlers: Sequence[Handler],
        options: InboxOptions,
        *,
        stop: StopRequest,
        watchdog: Watchdog,
        runner: Runner | None = None,
    ) -> None:
        self._handlers = handlers
        self._options = options
        self._stop = stop
        self._watchdog = watchdog
        self._broker = Outage("the broker")
        self._waits_for = "the broker"
        self._connection: Any = None
        self._speaks_amqp = speaks_amqp(options.broker_url)
        self._ticked_at = 0.0
        self._answers = Answers()
        self._runner = Runner(options, stop, handlers=lambda: handlers) if runner is None else runner
        self._reception = Reception(options, self._runner, self._answers.put)
        with_queues = (handler for handler in handlers if handler.kind.has_queue)
        lanes = [Lane(handler, queue) for handler in with_queues for queue in queues_of(handler, options)]
        self._pool = Pool(
            self._runner, size=options.CONCURRENCY, lanes=lanes, reception=self._reception, on_idle=self._answers.push
        )
        self._subscriptions = Subscriptions(lanes, options, self._runner, self._pool, self._answers, watchdog)

    @property
    def outcomes(self) -> Counter[Outcome]:
        return self._reception.outcomes

    def run(self, *, drain: bool = False) -> None:
        """Receive until asked to stop or, with `drain`, until every queue is empty and every delivery is answered."""
        self._pool.start()
        if drain:
            self._pool.hurry()
        try:
            while not self._stop:
                if self._stop.is_draining and not drain:
                    drain = True
                    self._pool.hurry()
                self._watchdog.beat()
                self._pool.refuse_if_ended()
                try:
                    self._connect()
                    self._pump()
                    self._broker.over()
                    self._waits_for = ""
                    if drain and not self._answers and self._pool.idle and self._subscriptions.are_drained:
                        break
                except failures_of(self._connection) as error:
                    self._wait_for_broker(error, drain=drain)
                except Exception as error:
                    # One malformed frame of the server must not end every consumer.
                    logger.exception("consumer: unexpected error in the broker connection. It is closed and opened again.")
                    self._wait_for_broker(error, drain=drain)
        finally:
            self._finish()

    def activity(self) -> Activity:
        """For the heartbeat, from any thread."""
        receiving = {lane.handler.name for lane in self._subscriptions.usable}
        return Activity(
            handlers=[handler for handler in self._handlers if handler.name in receiving or not handler.kind.has_queue],
            received=self.outcomes.total(),
            ran=self._runner.ran,
            waits_for=self._waits_for,
            broker_seconds=self._subscriptions.round_trip,
            queued=self._subscriptions.queued,
            waits=self._runner.outages.waits,
        )

    def _wait_for_broker(self, error: Exception, *, drain: bool) -> None:
        self._disconnect()
        reason, setting, url = describe(error), self._options.broker_setting, self._options.broker_url
        self._waits_for = f"the broker: {reason}"
        refused = is_refusal(error)
        wait_for_broker(self._broker, self._stop, reason, setting=setting, url=url, refused=refused, drain=drain)

    def _connect(self) -> None:
        if self._connection is not None:
            return
        url = self._options.broker_url
        self._connection = BrokerConnection(url, tls=self._options.tls, **connection_options(url))
        self._connection.ensure_connection(**connection_attempts(url))
        if self._speaks_amqp:
            read_in_chunks(self._connection.connection.transport)
        self._subscriptions.begin(self._connection)

    def _pump(self) -> None:
        """Send the answers, receive what has arrived, and wait briefly for either."""
        if not self._stop:
            self._subscriptions.subscribe()
        self._subscriptions.answer()
        self._receive()
        now = monotonic()
        if now - self._ticked_at > _HOUSEKEEPING_SECONDS:
            self._ticked_at = now
            self._connection.heartbeat_check()
            # Before the broker closes their channel (`consumer_timeout`).
            self._pool.store_stale(now - self._options.longest_silence)
            self._subscriptions.keep(now)
            self._pool.report_overdue(self._options.STUCK_AFTER)

    def _receive(self) -> None:
        if not self._speaks_amqp:
            with suppress(TimeoutError):
                seconds = _BUSY_TICK_SECONDS if self._subscriptions.unanswered else _TICK_SECONDS
                self._connection.drain_events(timeout=seconds)
            return
        amqp = self._connection.connection
        waits_for_more = False
        with suppress(TimeoutError):
            # Frames that py-amqp has read but not dispatched are in its own buffer, which a poll of the socket does not show.
            while amqp.transport._read_buffer or not waits_for_more:  # noqa: SLF001 - see read_in_chunks
                amqp.drain_events(timeout=_POLL_SECONDS)
                waits_for_more = True
                dispatch_what_is_read(amqp)
        self._answers.wait(_TICK_SECONDS, self._stop, also=amqp.transport.sock)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._subscriptions.end()
        if connection is not None:
            try:
                connection.collect(socket_timeout=1.0)
            except BROKER_FAILURES as error:
                logger.debug("consumer: closing the broker connection failed: %s", describe(error))

    def _finish(self) -> None:
        """Let the workers finish their loads, answer the broker, and return the other deliveries to it."""
        logger.info("consumer: stopping. Running deliveries are finished first; send the signal again to end at once.")
        renewal.announce_stop()
        self._pool.close()
        try:
            self._subscriptions.finish()
            while self._pool.alive and self._connection is not None:
                self._watchdog.beat()
                self._pump()
        except failures_of(self._connection) as error:
            logger.debug("consumer: the broker connection ended during the shutdown: %s", describe(error))
            self._disconnect()
        while self._pool.alive:
            self._watchdog.beat()
            self._pool.join(_TICK_SECONDS)
        if self._connection is None:
            return
        try:
            self._subscriptions.answer()
            # Closing the channels returns prefetched deliveries, at once and in order.
            self._connection.close()
        except failures_of(self._connection) as error:
            logger.debug("consumer: closing the broker connection failed: %s", describe(error))
            self._disconnect()
