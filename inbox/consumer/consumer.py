"""The consumer's two threads: one owns the broker connection, the other runs handlers.

The main thread receives, acknowledges and beats the heart, so that a long handler never costs the connection. The worker runs
one delivery at a time in the database. Between them go deliveries one way and answers the other, both tagged with the *epoch*
of the connection they belong to: an answer for an older life is dropped, because its delivery tag may name another message by
now. Any error of the connection or its channel ends that life; the broker delivers again, and the inbox absorbs it.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import kombu
from amqp.exceptions import ChannelError, PreconditionFailed
from django.db import connections

from inbox.conf import InboxOptions
from inbox.consumer.topology import queue_of
from inbox.handlers import Handler
from inbox.reading import read
from inbox.receiving import Received, receive
from inbox.transactions import DatabaseAway, decided
from outbox.kernel.broker import BROKER_FAILURES, connection_attempts, connection_options, masked, speaks_amqp
from outbox.kernel.clock import monotonic
from outbox.kernel.envelope import OPAQUE, Envelope, Undecodable, from_delivery
from outbox.kernel.loop import StopRequest, Watchdog
from outbox.kernel.outage import Outage
from outbox.kernel.text import describe

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.05
_BUSY_TICK_SECONDS = 0.005
_PUT_OFF_SECONDS = 1.0
_HEALTH_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message from the broker and the life of the connection it came on.

    Attributes:
        refused: why kombu could not unpack it, or "".
    """

    epoch: int
    handler: Handler
    message: kombu.Message
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What to tell the broker about a delivery, not before `at` (monotonic)."""

    delivery: Delivery
    requeue: bool
    at: float


class Consumer:
    """Receives for `handlers` until asked to stop."""

    def __init__(self, handlers: Sequence[Handler], options: InboxOptions, *, stop: StopRequest, watchdog: Watchdog) -> None:
        self._handlers = handlers
        self._options = options
        self._stop = stop
        self._watchdog = watchdog
        self._broker = Outage("the broker")
        self._database = Outage("the database")
        self._connection: Any = None
        self._queues: list[kombu.Queue] = []
        self._consumers: list[kombu.Consumer] = []
        self._epoch = 0
        self._closing = False
        self._differing: set[str] = set()
        self._busy: tuple[float, Delivery] | None = None
        self._told_of: Delivery | None = None
        self._deliveries: SimpleQueue[Delivery | None] = SimpleQueue()
        self._answers: deque[Answer] = deque()
        self._unanswered = 0
        self._checked_at = 0.0
        self.received: Counter[Received] = Counter()

    def run(self, *, drain: bool = False) -> None:
        """Receive until asked to stop or, with `drain`, until every queue is empty and nothing is in hand."""
        worker = threading.Thread(target=self._work, name="worker", daemon=True)
        worker.start()
        try:
            while not self._stop:
                self._watchdog.beat()
                if not worker.is_alive():
                    raise RuntimeError("The worker thread has ended; this process must be started anew.")
                try:
                    self._connect()
                    self._pump()
                    self._broker.over()
                    if drain and self._is_drained():
                        break
                    self._watch(worker)
                except self._failures() as error:
                    self._disconnect()
                    self._broker.wait(describe(error), self._stop)
                except Exception as error:
                    # What answers there need not speak its protocol well; one odd frame must not end every consumer.
                    logger.exception("The broker said something that cannot be understood.")
                    self._disconnect()
                    self._broker.wait(describe(error), self._stop)
        finally:
            self._finish(worker)

    # -------------------------------------------------------------------------------------------------- the connection's thread

    def _connect(self) -> None:
        if self._connection is not None:
            return
        self._epoch += 1
        self._unanswered = 0
        url = self._options.broker_url
        self._connection = kombu.Connection(url, **connection_options(url))
        self._connection.ensure_connection(**connection_attempts(url))
        self._declare()
        channel = self._connection.channel()
        self._queues, self._consumers = [], []
        for handler in self._handlers:
            queue = queue_of(handler, self._options)(channel)
            on_delivery = partial(self._on_delivery, self._epoch, handler)
            consumer = kombu.Consumer(channel, [queue], on_message=on_delivery, on_decode_error=on_delivery, auto_declare=False)
            consumer.qos(prefetch_count=self._options.PREFETCH)
            consumer.consume()
            self._queues.append(queue)
            self._consumers.append(consumer)
        self._checked_at = monotonic()
        logger.info("Consuming %d queues from %s.", len(self._queues), masked(url))

    def _declare(self) -> None:
        """Have all queues and their bindings, before the first delivery and then again and again.

        A binding that somebody removed, or that went with a deleted exchange, leaves a consumer that looks healthy and hears
        nothing. Each queue has a channel of its own here, because a refusal ends the channel.
        """
        for handler in self._handlers:
            queue = queue_of(handler, self._options)
            try:
                with self._connection.channel() as channel:
                    queue(channel).declare()
            except PreconditionFailed as error:
                if queue.name not in self._differing:
                    self._differing.add(queue.name)
                    logger.error(  # noqa: TRY400 - an operator's matter, no traceback
                        "The queue %r exists with other arguments (%s). It is used as it is. To have it as INBOX says, stop "
                        "its consumers, let it run empty, delete it and start again.",
                        queue.name,
                        describe(error),
                    )
                with self._connection.channel() as channel:
                    queue(channel).queue_declare(passive=True)
                    queue(channel).bind_to(queue.exchange, routing_key=queue.routing_key)

    def _on_delivery(self, epoch: int, handler: Handler, message: kombu.Message, error: BaseException | None = None) -> None:
        refused = f"It cannot be unpacked: {describe(error)}" if error else ""
        self._unanswered += 1
        self._deliveries.put(Delivery(epoch, handler, message, refused))

    def _pump(self) -> None:
        self._answer()
        with suppress(TimeoutError):
            # While the worker is at it, its answer is looked for more often.
            self._connection.drain_events(timeout=_BUSY_TICK_SECONDS if self._unanswered else _TICK_SECONDS)
        if speaks_amqp(self._options.broker_url):
            self._connection.heartbeat_check()
        if monotonic() - self._checked_at > _HEALTH_SECONDS:
            self._check_subscriptions()

    def _answer(self) -> None:
        now = monotonic()
        for _ in range(len(self._answers)):
            answer = self._answers.popleft()
            if answer.delivery.epoch != self._epoch:
                continue
            if answer.at > now:
                self._answers.append(answer)
            elif answer.requeue:
                answer.delivery.message.requeue()
                self._unanswered -= 1
            else:
                answer.delivery.message.ack()
                self._unanswered -= 1

    def _check_subscriptions(self) -> None:
        """Healthy means that the broker knows bindings and subscriptions of our queues, not that a socket is open."""
        self._checked_at = monotonic()
        self._declare()
        if not speaks_amqp(self._options.broker_url):
            return
        for queue in self._queues:
            if not queue.queue_declare(passive=True).consumer_count:
                raise ConnectionError(f"the broker has no subscription on queue {queue.name!r} any more")

    def _watch(self, worker: threading.Thread) -> None:
        """Tell about a handler that does not end: its inbox row is not committed, so nobody else can see it."""
        busy = self._busy
        if busy is None or busy[1] is self._told_of or monotonic() - busy[0] < self._options.STUCK_AFTER.total_seconds():
            return
        since, self._told_of = busy
        frame = sys._current_frames().get(worker.ident or 0)  # noqa: SLF001 - documented, and the only way to a thread's stack
        logger.warning(
            "%s has been handling message %s for %.0f s, and every other delivery of this process waits. It is here:\n%s",
            self._told_of.handler.name,
            self._told_of.message.properties.get("message_id"),
            monotonic() - since,
            "".join(traceback.format_stack(frame)),
        )

    def _is_drained(self) -> bool:
        if self._unanswered or self._answers:
            return False
        return not any(self._waiting_in(queue) for queue in self._queues)

    def _waiting_in(self, queue: kombu.Queue) -> int:
        try:
            return int(queue.queue_declare(passive=True).message_count)
        except ChannelError:
            # On kombu's virtual transports an empty queue is one that does not exist.
            if speaks_amqp(self._options.broker_url):
                raise
            return 0

    def _failures(self) -> tuple[type[Exception], ...]:
        if self._connection is None:
            return BROKER_FAILURES
        return (*BROKER_FAILURES, *self._connection.connection_errors, *self._connection.channel_errors)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._epoch += 1
        if connection is not None:
            try:
                connection.collect(socket_timeout=1.0)
            except BROKER_FAILURES as error:
                logger.debug("Discarding a broker connection: %s", describe(error))

    def _finish(self, worker: threading.Thread) -> None:
        """Let the worker end what it has in hand, tell the broker, give the rest back."""
        logger.info("Stopping: finishing what is in hand. Signal again to end at once.")
        self._closing = True
        self._deliveries.put(None)
        try:
            for consumer in self._consumers:
                consumer.cancel()
            while worker.is_alive() and self._connection is not None:
                self._watchdog.beat()
                self._pump()
        except self._failures() as error:
            logger.debug("The broker connection ended while finishing: %s", describe(error))
            self._disconnect()
        while worker.is_alive():
            self._watchdog.beat()
            worker.join(_TICK_SECONDS)
        if self._connection is None:
            return
        try:
            self._answer()
            # Closing the channel gives back what was prefetched, at once and in order.
            self._connection.close()
        except self._failures() as error:
            logger.debug("Closing the broker connection: %s", describe(error))
            self._disconnect()

    # ------------------------------------------------------------------------------------------------------ the worker's thread

    def _work(self) -> None:
        while (delivery := self._deliveries.get()) is not None:
            if not self._is_wanted(delivery):
                continue
            self._busy = monotonic(), delivery
            received = self._receive(delivery)
            self._busy = None
            if received is not None:
                self.received[received] += 1
                put_off = received is Received.PUT_OFF
                at = monotonic() + (_PUT_OFF_SECONDS if put_off else 0)
                self._answers.append(Answer(delivery, requeue=put_off, at=at))
        connections.close_all()

    def _is_wanted(self, delivery: Delivery) -> bool:
        return not (self._stop or self._closing) and delivery.epoch == self._epoch

    def _receive(self, delivery: Delivery) -> Received | None:
        """Take a delivery to its end; None leaves it with the broker, which delivers it to the next life."""
        handler = delivery.handler
        redelivered = bool(delivery.message.delivery_info.get("redelivered"))
        owed: Callable[[], None] | None = None
        while self._is_wanted(delivery):
            try:
                if owed is not None:
                    decided(owed, handler.using)
                    owed = None
                envelope, refused = _envelope(delivery.message)
                arrival = read(handler, envelope, self._options, refused=delivery.refused or refused)
                received = receive(handler, arrival, self._options, redelivered=redelivered)
            except DatabaseAway as error:
                owed = error.owed or owed
                self._database.wait(error, self._stop)
                continue
            except BaseException:
                # Nothing may end the worker while the process goes on receiving.
                logger.exception("%s: a delivery met an error nobody foresaw; it goes back to the broker.", handler.name)
                connections.close_all()
                return Received.PUT_OFF
            self._database.over()
            return received
        return None


def _envelope(message: kombu.Message) -> tuple[Envelope, str]:
    """What was delivered, and why it cannot be read, or ""."""
    body: Any = message.body
    if isinstance(body, str):
        # py-amqp has decoded it by its content encoding; what was sent is what is stored and compared.
        body = body.encode(message.content_encoding or "utf-8", "surrogateescape")
    body = bytes(body)
    properties = {**message.properties, "content_type": message.content_type}
    headers = message.headers or {}
    routing_key = str(message.delivery_info.get("routing_key") or "")
    read_as = partial(from_delivery, headers=headers, body=body, routing_key=routing_key)
    try:
        return read_as(properties=properties), ""
    except Undecodable as error:
        # What can be told without the body: its binary-mode attributes and AMQP properties.
        return read_as(properties={**properties, "content_type": OPAQUE}), str(error)
