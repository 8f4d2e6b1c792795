"""The thread that owns the broker connection.

It receives, acknowledges and sends heartbeats, so that a long handler never loses the connection. The pool's threads run one
load each in the database. Deliveries go to them and answers come back. A delivery belongs to its channel: when that has ended,
it is dropped, and so is its answer, because its delivery tag may now name another message. Any error of the connection or of a
channel closes the connection; the broker delivers again, and the inbox suppresses the duplicates.
"""

import random
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple

import kombu
from amqp.exceptions import ChannelError

from exactly_once.conf.masking import masked
from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.process.loop import Bell, StopRequest, Watchdog
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
from inbox.consumer.channels import Acks, answering_in_time, receiving_bodies_as_sent
from inbox.consumer.heartbeat import Activity
from inbox.consumer.lanes import Delivery, Lane, prefetch_of
from inbox.consumer.pool import Pool
from inbox.consumer.reception import Answers, Reception
from inbox.consumer.runner import Runner
from inbox.consumer.topology import Policies, Unusable, declare, queues_of, refuse_limits, refused_for_handler_only, why_left
from inbox.handlers.handler import Handler
from inbox.leases import renewal
from inbox.limits.shedder import shedder_of
from inbox.states import Outcome

logger = escaping_logger(__name__)

_TICK_SECONDS = 0.05
_BUSY_TICK_SECONDS = 0.005
_HOUSEKEEPING_SECONDS = 0.5
_WAKE_UP_ANSWERS = 10
_POLL_SECONDS = 0.0001
_DEFERRED_SECONDS = 1.0
_UNSTORED_SECONDS = (2.0, 60.0)
"""The shortest and the longest time until a delivery that could not be stored is tried again."""
_UNSTORABLE_AFTER = 1.5
"""Multiple of `longest_silence` after which unstorable deliveries return to the broker, before its `consumer_timeout`."""
_HEALTH_SECONDS = 30.0
_MOST_NAMES = 20
_NOT_RECEIVED = "Until then no message is received for it."


class Answer(NamedTuple):
    """Acknowledge a delivery, or run it `again`; not before `at` (monotonic)."""

    delivery: Delivery
    again: bool
    at: float


@dataclass(frozen=True, slots=True)
class Subscription:
    """A queue that this process receives from, on a channel of its own, and the lane its deliveries go to."""

    lane: Lane
    queue: kombu.Queue
    consumer: kombu.Consumer


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
        self._handlers = [handler for handler in handlers if not handler.kind.all_of]
        self._joins = [handler for handler in handlers if handler.kind.all_of]
        self._options = options
        self._stop = stop
        self._watchdog = watchdog
        self._broker = Outage("the broker")
        self._waits_for = "the broker"
        self._connection: Any = None
        self._lanes = [Lane(handler, queue) for handler in self._handlers for queue in queues_of(handler, options)]
        self._problems: dict[str | Lane, str] = {}
        self._policies = Policies(options)
        self._unusable: set[str] = set()
        self._forbidden: set[Lane] = set()
        self._suspected: set[Lane] = set()
        self._answers: deque[Answer] = deque()
        self._deferred: list[Answer] = []
        self._answered = Bell()
        self._checked_at = self._ticked_at = 0.0
        self._speaks_amqp = False
        self._round_trip: float | None = None
        self._queued: Counter[str] = Counter()
        self._open: dict[Acks, Subscription] = {}
        self._runner = Runner(options, stop) if runner is None else runner
        self._reception = Reception(options, self._runner, self._put_answers)
        self._pool = Pool(
            self._runner,
            size=options.CONCURRENCY,
            lanes=self._lanes,
            reception=self._reception,
            on_idle=self._push_answers,
        )

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
                    if drain and self._is_drained():
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
        receiving = {lane.handler.name for lane in self._usable}
        return Activity(
            handlers=[*(handler for handler in self._handlers if handler.name in receiving), *self._joins],
            received=self.outcomes.total(),
            ran=self._runner.ran,
            waits_for=self._waits_for,
            broker_seconds=self._round_trip,
            queued=self._queued,
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
        self._policies.read()
        self._unusable = self._declare()
        self._forbidden.clear()
        self._speaks_amqp = speaks_amqp(url)
        if self._speaks_amqp:
            read_in_chunks(self._connection.connection.transport)
        self._read_queues()
        self._checked_at = monotonic()

    def _subscribe(self) -> None:
        """Receive from the queues of handlers that are not paused and whose databases can store messages.

        A delivery that cannot be stored would return to the broker when this process ends, and count as one more delivery.
        """
        open_lanes = {subscription.lane for subscription in self._open.values()}
        lanes = [lane for lane in self._unpaused if lane not in open_lanes and self._pool.can_store(lane)]
        suspected = [lane for lane in lanes if lane in self._suspected]
        for lane in [*(lane for lane in lanes if lane not in suspected), *random.sample(suspected, len(suspected))]:
            if lane in self._forbidden:
                continue
            channel = receiving_bodies_as_sent(self._connection.channel())
            if self._speaks_amqp:
                answering_in_time(channel)
            queue = lane.queue(channel)
            acks = Acks(channel, multiple=self._speaks_amqp)
            on_delivery = partial(self._on_delivery, lane, acks)
            consumer = kombu.Consumer(channel, [queue], on_message=on_delivery, auto_declare=False)
            self._open[acks] = Subscription(lane, queue, consumer)
            consumer.qos(prefetch_count=prefetch_of(lane.handler, self._options))
            try:
                with refused_for_handler_only(lane.handler, self._options):
                    if lane in self._suspected:
                        self._try_suspected(lane.queue.name)
                    consumer.consume()
            except Unusable as error:
                # Until the next check of the queues. py-amqp opens a channel again that the broker has closed.
                self._close(acks)
                # Each queue that hangs delays the others by seconds, so no more than one is tried at a time.
                self._forbidden |= {lane, *(suspected if lane in suspected else ())}
                self._report_problem(lane, f"{error} {_NOT_RECEIVED}")
            except failures_of(self._connection):
                if self._speaks_amqp:
                    self._suspected.add(lane)
                raise
            else:
                self._suspected.discard(lane)
                self._report_problem(lane, "")
        if len(self._open) > len(open_lanes):
            queues = "1 queue" if len(self._open) == 1 else f"{len(self._open)} queues"
            logger.info("consumer: receiving from %s at %s.", queues, masked(self._options.broker_url))

    def _try_suspected(self, queue: str) -> None:
        """Try a queue whose subscription ended the last connection on a separate connection, before it ends this one, too.

        RabbitMQ closes the connection of a consumer whose quorum queue has lost its majority.

        Raises:
            Unusable: that connection was closed as well.
        """
        own = self._connection.clone()
        try:
            own.ensure_connection(**connection_attempts(self._options.broker_url))
            channel = answering_in_time(own.channel())
            channel.basic_qos(0, 1, False)
            channel.basic_consume(queue, no_ack=False)
        except failures_of(self._connection) as error:
            raise Unusable(
                f"The broker cannot deliver from the queue {queue!r} ({describe(error)}). Check that its nodes are "
                "available: rabbitmq-queues quorum_status, rabbitmqctl list_unresponsive_queues."
            ) from error
        finally:
            own.collect(socket_timeout=1.0)

    @property
    def _usable(self) -> list[Lane]:
        """The lanes whose queues may be received from."""
        return [lane for lane in self._lanes if lane.handler.name not in self._unusable and lane not in self._forbidden]

    @property
    def _unpaused(self) -> list[Lane]:
        """The usable lanes whose handlers no operator has paused, and which do not wait for their past."""
        paused, starting = self._runner.is_paused, self._runner.is_starting
        return [lane for lane in self._usable if not (paused(lane.handler) or starting(lane.handler))]

    def _declare(self) -> set[str]:
        """Declare all queues and bindings, at the start and periodically; return the handlers with unusable queues.

        After its binding was removed, or its exchange deleted, a consumer looks healthy but receives nothing.
        """
        unusable = set()
        for handler in self._handlers:
            self._watchdog.beat()
            try:
                problem = declare(self._connection, handler, self._options)
                refuse_limits(self._connection, self._policies, handler, self._options)
            except Unusable as error:
                unusable.add(handler.name)
                problem = f"{error} {_NOT_RECEIVED}"
            self._report_problem(handler.name, problem)
        names = self._runner.unattended.names if self._runner.unattended and speaks_amqp(self._options.broker_url) else []
        for old in names[:_MOST_NAMES]:
            self._report_problem(f"queue of {old.name} for {old.topic}", why_left(self._connection, old, self._options))
        self._runner.declared(handler for handler in self._handlers if handler.name not in unusable)
        return unusable

    def _report_problem(self, about: str | Lane, problem: str) -> None:
        """Log a complaint once, and again if it returns after "" has cleared it."""
        if problem and problem not in self._problems.values():
            logger.error("consumer: %s", problem)
        self._problems[about] = problem

    def _on_delivery(self, lane: Lane, acks: Acks, message: kombu.Message) -> None:
        acks.delivered(message)
        self._pool.put(lane, Delivery(acks, lane.handler, message, monotonic()))

    def _pump(self) -> None:
        """Send the answers, receive what has arrived, and wait briefly for either."""
        if len(self._open) < len(self._lanes) and not self._stop:
            self._subscribe()
        self._answer()
        self._receive()
        now = monotonic()
        if now - self._ticked_at > _HOUSEKEEPING_SECONDS:
            self._ticked_at = now
            self._connection.heartbeat_check()
            # Before the broker closes their channel (`consumer_timeout`).
            self._pool.store_stale(now - self._options.longest_silence)
            self._return_unstorable(now)
            self._return_paused()
            self._pool.report_overdue(self._options.STUCK_AFTER)
            if now - self._checked_at > _HEALTH_SECONDS:
                self._check_subscriptions()
            for subscription in self._open.values():
                if (shedder := shedder_of(subscription.lane.handler)) is not None:
                    shedder.record_lag(*self._length_of(subscription.queue))

    def _receive(self) -> None:
        if not self._speaks_amqp:
            with suppress(TimeoutError):
                self._connection.drain_events(timeout=_BUSY_TICK_SECONDS if self._unanswered else _TICK_SECONDS)
            return
        amqp = self._connection.connection
        waits_for_more = False
        with suppress(TimeoutError):
            # Frames that py-amqp has read but not dispatched are in its own buffer, which a poll of the socket does not show.
            while amqp.transport._read_buffer or not waits_for_more:  # noqa: SLF001 - see read_in_chunks
                amqp.drain_events(timeout=_POLL_SECONDS)
                waits_for_more = True
                dispatch_what_is_read(amqp)
        if len(self._answers) < _WAKE_UP_ANSWERS:
            self._answered.wait(_TICK_SECONDS, None if self._stop else self._stop, also=amqp.transport.sock)

    def _answer(self) -> None:
        now = monotonic()
        answers = [*self._deferred, *(self._answers.popleft() for _ in range(len(self._answers)))]
        self._deferred = []
        for answer in answers:
            acks, delivery = answer.delivery.acks, answer.delivery
            if not acks.is_open:
                continue
            if answer.at > now:
                self._deferred.append(answer)
            elif not answer.again:
                acks.settle(delivery.message)
            elif now - delivery.at < self._options.longest_silence:
                self._pool.put(self._open[acks].lane, delivery)
            else:
                acks.requeue(delivery.message)
        for acks in self._open:
            acks.flush()

    @property
    def _unanswered(self) -> int:
        return sum(map(len, self._open))

    def _put_answers(self, answers: Answers) -> None:
        """Called by the workers. A delivery without an answer stays here, because the broker counts each redelivery."""
        now = monotonic()
        for delivery, outcome in answers:
            delay = 0.0
            if outcome is Outcome.DEFERRED:
                delay = _DEFERRED_SECONDS
            elif outcome is Outcome.UNSTORED:
                shortest, longest = _UNSTORED_SECONDS
                # As long as it has been here: the delay doubles.
                delay = min(max(now - delivery.at, shortest), longest)
            self._answers.append(Answer(delivery, again=delay > 0, at=now + delay))
        # Not for each answer: the connection's thread takes several at its next tick, or when a worker is idle.
        if len(self._answers) >= _WAKE_UP_ANSWERS:
            self._answered.ring()

    def _push_answers(self) -> None:
        if self._answers:
            self._answered.ring()

    def _check_subscriptions(self) -> None:
        """Check that the broker has this process's bindings and subscriptions; an open socket does not show that."""
        self._checked_at = monotonic()
        if self._unusable:
            self._policies.read()
        if self._declare() != self._unusable:
            raise ConnectionError("the usable queues have changed")
        self._forbidden.clear()
        self._read_queues()

    def _read_queues(self) -> None:
        """Read how many messages wait in the queues, also in those of paused handlers.

        Raises:
            ConnectionError: the broker no longer has a subscription of this process.
        """
        receiving, queued = {subscription.lane for subscription in self._open.values()}, Counter[str]()
        for lane in self._usable:
            try:
                with self._connection.channel() as channel:
                    asked_at = monotonic()
                    waiting, subscriptions = self._length_of(lane.queue(channel))
                    self._round_trip = monotonic() - asked_at if self._speaks_amqp else None
            except self._connection.channel_errors as error:
                logger.debug("consumer: the length of the queue %r is unknown: %s", lane.queue.name, describe(error))
                waiting = subscriptions = 0
            if lane in receiving and self._speaks_amqp and not subscriptions:
                # A queue that hangs is said to have none. It must not hold up the next connection as well.
                self._suspected.add(lane)
                raise ConnectionError(f"the broker no longer has the subscription on the queue {lane.queue.name!r}")
            queued[lane.handler.name] += waiting
        self._queued = queued

    def _return_unstorable(self, now: float) -> None:
        """Close the channels of queues whose deliveries have waited here for too long, because they cannot be stored.

        The broker would close them after each `consumer_timeout` of the outage, which ends the connection and all its other
        channels, and would count a delivery each time. This counts one per outage.
        """
        for lane in self._pool.unstorable(now - _UNSTORABLE_AFTER * self._options.longest_silence):
            for acks in [acks for acks, subscription in self._open.items() if subscription.lane is lane]:
                logger.warning(
                    "handler %s: its database could not store %d deliveries in time. They were returned to the broker. No "
                    "message is received for this handler until its database is available.",
                    lane.handler.name,
                    self._close(acks),
                )

    def _close(self, acks: Acks) -> int:
        """Close the channel of a queue: its unanswered deliveries are the broker's again. Returns how many waited here.

        It is not cancelled first: from then on the broker would deliver later messages to the next consumer, and an ordered
        queue would lose its order. The end of a channel requeues its deliveries before another consumer becomes active.
        """
        del self._open[acks]
        acks.close()
        return self._pool.drop_ended()

    def _return_paused(self) -> None:
        """Close the channels of paused handlers, once their loads in hand are answered.

        A load that is in hand would be delivered again.
        """
        handlers = {acks: subscription.lane.handler for acks, subscription in self._open.items()}
        paused = [(acks, handler) for acks, handler in handlers.items() if self._runner.is_paused(handler)]
        if ended := [(acks, handler.name) for acks, handler in paused if not self._pool.is_running(handler)]:
            self._answer()
            for acks, name in ended:
                logger.info("handler %s: paused. Its queue keeps the messages; returned to it: %d.", name, self._close(acks))

    def _is_drained(self) -> bool:
        if self._unanswered or self._answers or not self._pool.idle:
            return False
        if len(self._open) < len(self._unpaused):
            return False
        waiting = any(self._length_of(subscription.queue)[0] for subscription in self._open.values())
        # The broker's count excludes deliveries in transit; they may have arrived during the query.
        return not waiting and not self._unanswered

    def _length_of(self, queue: kombu.Queue) -> tuple[int, int]:
        """The number of messages that wait in it, and of its consumers."""
        try:
            declared = queue.queue_declare(passive=True)
            return int(declared.message_count), int(declared.consumer_count)
        except ChannelError:
            # On kombu's virtual transports an empty queue does not exist.
            if speaks_amqp(self._options.broker_url):
                raise
            return 0, 1

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        for acks in self._open:
            acks.is_open = False
        self._open = {}
        self._pool.drop_ended()
        if connection is not None:
            try:
                connection.collect(socket_timeout=1.0)
            except BROKER_FAILURES as error:
                logger.debug("consumer: closing the broker connection failed: %s", describe(error))

    def _finish(self) -> None:
        """Let the workers finish their loads, answer the broker, and return the other deliveries to it."""
        logger.info("consumer: stopping. Running deliveries are finished first; send the signal again to end at once.")
        renewal.announce_stop()
        self._reception.close()
        self._pool.close()
        # From here on the queues may have no subscription.
        self._checked_at = inf
        try:
            for subscription in self._open.values():
                # The next consumer of an ordered queue must not start before these deliveries are answered. It starts when the
                # channel is closed.
                if not subscription.lane.handler.ordered:
                    subscription.consumer.cancel()
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
            self._answer()
            # Closing the channels returns prefetched deliveries, at once and in order.
            self._connection.close()
        except failures_of(self._connection) as error:
            logger.debug("consumer: closing the broker connection failed: %s", describe(error))
            self._disconnect()
