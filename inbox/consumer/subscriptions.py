"""The queues that a consumer receives from, each on a channel of its own.

A queue is *unusable* if receiving from it would lose messages or their order, or if the broker refuses it. Nothing is received
from it until a check has found it usable; the other queues are not affected.

kombu inflates a compressed body, and py-amqp decodes it by its content encoding, as soon as it arrives: without a limit, on the
thread that owns the connection, and before the inbox knows which message it is. Here both are disabled; see
`inbox.receiving.reading`.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from typing import Any

import kombu
from amqp.exceptions import ChannelError

from exactly_once.conf.masking import masked
from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.process.loop import Watchdog
from exactly_once.transport.broker import connection_attempts, failures_of, speaks_amqp
from exactly_once.wire.envelope import COMPRESSION
from exactly_once.wire.text import describe
from inbox.conf import InboxOptions
from inbox.consumer.answers import Acks, Answers, Delivery
from inbox.consumer.lanes import Lane, prefetch_of
from inbox.consumer.pool import Pool
from inbox.consumer.runner import Runner
from inbox.consumer.topology import Policies, Unusable, declare, refuse_limits, refused_for_handler_only, why_left
from inbox.limits.shedder import shedder_of

logger = escaping_logger(__name__)

_UNSTORABLE_AFTER = 1.5
"""Multiple of `longest_silence` after which unstorable deliveries return to the broker, before its `consumer_timeout`."""
_HEALTH_SECONDS = 30.0
_MOST_NAMES = 20
_ANSWER_SECONDS = 4.0
"""Shorter than between two heartbeats of the broker, each of which begins the wait again."""
_NOT_RECEIVED = "Until then no message is received for it."


@dataclass(frozen=True, slots=True)
class Subscription:
    """A queue on its channel."""

    acks: Acks
    queue: kombu.Queue
    consumer: kombu.Consumer


class Subscriptions:
    """Only for the thread that owns the connection, except `usable`, `queued` and `round_trip`.

    Attributes:
        open: the lanes that receive deliveries.
        queued: by handler, how many messages wait in its queues, those of paused handlers included.
        round_trip: that of the last question to the broker; None if it was not asked.
    """

    def __init__(
        self, lanes: Sequence[Lane], options: InboxOptions, runner: Runner, pool: Pool, answers: Answers, watchdog: Watchdog
    ) -> None:
        self._lanes = lanes
        self._options = options
        self._runner = runner
        self._pool = pool
        self._answers = answers
        self._watchdog = watchdog
        self._speaks_amqp = speaks_amqp(options.broker_url)
        self._connection: Any = None
        self._policies = Policies(options)
        self._problems: dict[str | Lane, str] = {}
        self._unusable: set[Lane] = set()
        self._suspected: set[Lane] = set()
        self._checked_at = 0.0
        self.open: dict[Lane, Subscription] = {}
        self.queued: Counter[str] = Counter()
        self.round_trip: float | None = None

    def begin(self, connection: Any) -> None:
        """Declare the queues on a new connection."""
        self._connection = connection
        self._policies.read()
        self._check()

    def end(self) -> None:
        """The connection has ended: the broker delivers again what is unanswered."""
        for subscription in self.open.values():
            subscription.acks.is_open = False
        self.open = {}
        self._pool.drop_ended()

    def finish(self) -> None:
        """Receive nothing more; what was received is finished and answered. From here on a queue may have no subscription."""
        self._checked_at = inf
        for lane, subscription in self.open.items():
            # The next consumer of an ordered queue must not start before these deliveries are answered. It starts when the
            # channel is closed.
            if not lane.handler.ordered:
                subscription.consumer.cancel()

    @property
    def usable(self) -> list[Lane]:
        """The lanes whose queues may be received from."""
        return [lane for lane in self._lanes if lane not in self._unusable]

    @property
    def unanswered(self) -> int:
        return sum(len(subscription.acks) for subscription in self.open.values())

    @property
    def are_drained(self) -> bool:
        """Are all queues received from, but those of paused handlers, and empty, and is every delivery answered?"""
        if self.unanswered or len(self.open) < len(self._unpaused):
            return False
        waiting = any(self._length_of(subscription.queue)[0] for subscription in self.open.values())
        # The broker's count excludes deliveries in transit; they may have arrived during the query.
        return not waiting and not self.unanswered

    def subscribe(self) -> None:
        """Receive from the queues of handlers that are not paused and whose databases can store messages.

        A delivery that cannot be stored would return to the broker when this process ends, and count as one more delivery.
        """
        if len(self.open) == len(self._lanes):
            return
        lanes = [lane for lane in self._unpaused if lane not in self.open and self._runner.can_store(lane.handler.using)]
        suspected = [lane for lane in lanes if lane in self._suspected]
        before = len(self.open)
        for lane in [*(lane for lane in lanes if lane not in suspected), *random.sample(suspected, len(suspected))]:
            if lane not in self._unusable:
                self._subscribe(lane, suspected)
        if len(self.open) > before:
            queues = "1 queue" if len(self.open) == 1 else f"{len(self.open)} queues"
            logger.info("consumer: receiving from %s at %s.", queues, masked(self._options.broker_url))

    def _subscribe(self, lane: Lane, suspected: Sequence[Lane]) -> None:
        channel = _receiving_bodies_as_sent(self._connection.channel())
        if self._speaks_amqp:
            _answering_in_time(channel)
        queue, acks = lane.queue(channel), Acks(channel, multiple=self._speaks_amqp)
        consumer = kombu.Consumer(channel, [queue], on_message=partial(self._on_delivery, lane, acks), auto_declare=False)
        self.open[lane] = Subscription(acks, queue, consumer)
        consumer.qos(prefetch_count=prefetch_of(lane.handler, self._options))
        try:
            with refused_for_handler_only(lane.handler, self._options):
                if lane in suspected:
                    self._try_suspected(lane.queue.name)
                consumer.consume()
        except Unusable as error:
            # py-amqp opens a channel again that the broker has closed.
            self._close(lane)
            # Each queue that hangs delays the others by seconds, so no more than one is tried at a time.
            self._unusable |= {lane, *(suspected if lane in suspected else ())}
            self._report_problem(lane, f"{error} {_NOT_RECEIVED}")
        except failures_of(self._connection):
            if self._speaks_amqp:
                self._suspected.add(lane)
            raise
        else:
            self._suspected.discard(lane)
            self._report_problem(lane, "")

    def _on_delivery(self, lane: Lane, acks: Acks, message: kombu.Message) -> None:
        acks.delivered(message)
        self._pool.put(lane, Delivery(acks, lane.handler, message, monotonic()))

    def _try_suspected(self, queue: str) -> None:
        """Try a queue whose subscription ended the last connection on a separate connection, before it ends this one, too.

        RabbitMQ closes the connection of a consumer whose quorum queue has lost its majority.

        Raises:
            Unusable: that connection was closed as well.
        """
        own = self._connection.clone()
        try:
            own.ensure_connection(**connection_attempts(self._options.broker_url))
            channel = _answering_in_time(own.channel())
            channel.basic_qos(0, 1, False)
            channel.basic_consume(queue, no_ack=False)
        except failures_of(self._connection) as error:
            raise Unusable(
                f"The broker cannot deliver from the queue {queue!r} ({describe(error)}). Check that its nodes are "
                "available: rabbitmq-queues quorum_status, rabbitmqctl list_unresponsive_queues."
            ) from error
        finally:
            own.collect(socket_timeout=1.0)

    def answer(self) -> None:
        """Acknowledge the deliveries that have an outcome; the others are run again, or returned to the broker in time."""
        for answer in self._answers.take():
            delivery = answer.delivery
            if not answer.again:
                delivery.acks.settle(delivery.message)
            elif monotonic() - delivery.at < self._options.longest_silence:
                lane = next(lane for lane, subscription in self.open.items() if subscription.acks is delivery.acks)
                self._pool.put(lane, delivery)
            else:
                delivery.acks.requeue(delivery.message)
        for subscription in self.open.values():
            subscription.acks.flush()

    def keep(self, now: float) -> None:
        """Return what cannot be handled, and check the queues from time to time.

        Raises:
            ConnectionError: the broker no longer has a subscription of this process.
        """
        self._return_unstorable(now)
        self._return_paused()
        if now - self._checked_at > _HEALTH_SECONDS:
            if self._unusable:
                self._policies.read()
            self._check()
        for lane, subscription in self.open.items():
            if (shedder := shedder_of(lane.handler)) is not None:
                shedder.record_lag(*self._length_of(subscription.queue))

    def _check(self) -> None:
        """Declare all queues and bindings, and check that the broker has the subscriptions.

        After its binding was removed, or its exchange deleted, a consumer looks healthy but receives nothing.
        """
        self._checked_at = monotonic()
        unusable: set[Lane] = set()
        for handler in {lane.handler.name: lane.handler for lane in self._lanes}.values():
            self._watchdog.beat()
            try:
                problem = declare(self._connection, handler, self._options)
                refuse_limits(self._connection, self._policies, handler, self._options)
            except Unusable as error:
                unusable.update(lane for lane in self._lanes if lane.handler is handler)
                problem = f"{error} {_NOT_RECEIVED}"
            self._report_problem(handler.name, problem)
        names = self._runner.unattended.names if self._runner.unattended and self._speaks_amqp else []
        for old in names[:_MOST_NAMES]:
            self._report_problem(f"queue of {old.name} for {old.topic}", why_left(self._connection, old, self._options))
        self._unusable = unusable
        self._runner.declared(lane.handler for lane in self.usable)
        for lane in self.open.keys() & unusable:
            self._close(lane)
        self._read_queues()

    def _read_queues(self) -> None:
        """Read how many messages wait in the queues.

        Raises:
            ConnectionError: the broker no longer has a subscription of this process.
        """
        queued = Counter[str]()
        for lane in self.usable:
            try:
                with self._connection.channel() as channel:
                    asked_at = monotonic()
                    waiting, subscriptions = self._length_of(lane.queue(channel))
                    self.round_trip = monotonic() - asked_at if self._speaks_amqp else None
            except self._connection.channel_errors as error:
                logger.debug("consumer: the length of the queue %r is unknown: %s", lane.queue.name, describe(error))
                waiting = subscriptions = 0
            if lane in self.open and self._speaks_amqp and not subscriptions:
                # A queue that hangs is said to have none. It must not hold up the next connection as well.
                self._suspected.add(lane)
                raise ConnectionError(f"the broker no longer has the subscription on the queue {lane.queue.name!r}")
            queued[lane.handler.name] += waiting
        self.queued = queued

    def _length_of(self, queue: kombu.Queue) -> tuple[int, int]:
        """The number of messages that wait in it, and of its consumers."""
        try:
            declared = queue.queue_declare(passive=True)
            return int(declared.message_count), int(declared.consumer_count)
        except ChannelError:
            # On kombu's virtual transports an empty queue does not exist.
            if self._speaks_amqp:
                raise
            return 0, 1

    @property
    def _unpaused(self) -> list[Lane]:
        """The usable lanes whose handlers no operator has paused, and which do not wait for their past."""
        paused, starting = self._runner.is_paused, self._runner.is_starting
        return [lane for lane in self.usable if not (paused(lane.handler) or starting(lane.handler))]

    def _report_problem(self, about: str | Lane, problem: str) -> None:
        """Log a complaint once, and again if it returns after "" has cleared it."""
        if problem and problem not in self._problems.values():
            logger.error("consumer: %s", problem)
        self._problems[about] = problem

    def _return_unstorable(self, now: float) -> None:
        """Close the channels of queues whose deliveries have waited here for too long, because they cannot be stored.

        The broker would close them after each `consumer_timeout` of the outage, which ends the connection and all its other
        channels, and would count a delivery each time. This counts one per outage.
        """
        unstorable = self._pool.unstorable(now - _UNSTORABLE_AFTER * self._options.longest_silence)
        for lane in [lane for lane in unstorable if lane in self.open]:
            logger.warning(
                "handler %s: its database could not store %d deliveries in time. They were returned to the broker. No "
                "message is received for this handler until its database is available.",
                lane.handler.name,
                self._close(lane),
            )

    def _return_paused(self) -> None:
        """Close the channels of paused handlers, once their loads in hand are answered.

        A load that is in hand would be delivered again.
        """
        paused = [lane for lane in self.open if self._runner.is_paused(lane.handler)]
        if ended := [lane for lane in paused if not self._pool.is_running(lane.handler)]:
            self.answer()
            for lane in ended:
                returned = self._close(lane)
                logger.info(
                    "handler %s: paused. Its queue keeps the messages; returned to it: %d.", lane.handler.name, returned
                )

    def _close(self, lane: Lane) -> int:
        """Close the channel of a queue: its unanswered deliveries are the broker's again. Returns how many waited here.

        It is not cancelled first: from then on the broker would deliver later messages to the next consumer, and an ordered
        queue would lose its order. The end of a channel requeues its deliveries before another consumer becomes active.
        """
        self.open.pop(lane).acks.close()
        return self._pool.drop_ended()


def _receiving_bodies_as_sent(channel: Any) -> Any:
    """Make `channel` leave the bodies of its deliveries unchanged."""
    channel.Message = _as_sent(channel.Message)
    if hasattr(channel, "auto_decode"):
        channel.auto_decode = False
    return channel


@cache
def _as_sent(kind: type[Any]) -> type[Any]:
    class AsSent(kind):  # type: ignore[misc] # kombu's class for this transport
        # kombu does not inflate the body of a message that has errors.
        errors: Any = ("not inflated",)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.errors = []

        def serializable(self) -> Any:
            """The form that a virtual transport requeues. kombu's own form omits the compression header."""
            stored = super().serializable()
            if COMPRESSION in self.headers:
                stored["headers"][COMPRESSION] = self.headers[COMPRESSION]
            return stored

    return AsSent


def _answering_in_time(channel: Any) -> Any:
    """The channel of a subscription, which raises TimeoutError while the broker does not answer it: a single queue may hang."""
    channel.wait = partial(channel.wait, timeout=_ANSWER_SECONDS)
    return channel
