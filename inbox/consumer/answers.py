"""Deliveries, and their answers on the way from the workers to the thread that owns the broker connection.

For RabbitMQ, an ack with `multiple` ("this tag and all before it") costs as much as a single ack; all earlier tags must be
settled. So one frame acknowledges the settled tags up to the first unsettled one. The later ones are acknowledged singly.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import kombu
from amqp import spec

from exactly_once.process.clock import monotonic
from exactly_once.process.loop import Bell, StopRequest
from inbox.handlers.handler import Handler
from inbox.states import Outcome
from inbox.transactions.arrival import Arrival

_WAKE_UP_ANSWERS = 10
_DEFERRED_SECONDS = 1.0
_UNSTORED_SECONDS = (2.0, 60.0)
"""The shortest and the longest time until a delivery that could not be stored is tried again."""


class Acks:
    """The outstanding deliveries of `channel`. Only for the thread that owns the connection.

    Attributes:
        is_open: for any thread: the channel has not ended. After it has, the broker delivers its messages again.
    """

    def __init__(self, channel: Any, *, multiple: bool) -> None:
        self.is_open = True
        self._channel = channel
        self._multiple = multiple
        self._outstanding: dict[Any, None] = {}
        self._settled: set[Any] = set()

    def __len__(self) -> int:
        return len(self._outstanding)

    def close(self) -> None:
        self.is_open = False
        self._channel.close()

    def delivered(self, message: kombu.Message) -> None:
        self._outstanding[message.delivery_tag] = None

    def settle(self, message: kombu.Message) -> None:
        """Mark it to be acknowledged by the next `flush`."""
        self._settled.add(message.delivery_tag)

    def requeue(self, message: kombu.Message) -> None:
        """Return it to the broker, which delivers it again."""
        if self._multiple:
            # Unlike basic.reject, RabbitMQ 4.3+ does not count this as a failed delivery. py-amqp has no method for it.
            self._channel.send_method(spec.Basic.Nack, "Lbb", (message.delivery_tag, False, True))
        else:
            message.requeue()
        self._outstanding.pop(message.delivery_tag, None)

    def flush(self) -> None:
        if not self._settled:
            return
        if self._multiple:
            self._flush_front()
        for tag in self._settled:
            self._channel.basic_ack(tag)
            self._outstanding.pop(tag, None)
        self._settled.clear()

    def _flush_front(self) -> None:
        last = None
        for tag in self._outstanding:
            if tag not in self._settled:
                break
            last = tag
            self._settled.discard(tag)
        if last is None:
            return
        self._channel.basic_ack(last, multiple=True)
        while (tag := next(iter(self._outstanding))) != last:
            del self._outstanding[tag]
        del self._outstanding[last]


@dataclass(eq=False, slots=True)
class Delivery:
    """A message from the broker.

    Attributes:
        acks: those of its channel.
        at: when it arrived (monotonic).
        arrival: its content, once a worker has read it.
        redelivered: the broker has delivered it before.
        is_acknowledged: it was acknowledged before its handler ended. The broker must not be answered twice.
    """

    acks: Acks
    handler: Handler
    message: kombu.Message
    at: float
    arrival: Arrival = field(init=False)
    redelivered: bool = field(init=False)
    is_acknowledged: bool = False

    def __post_init__(self) -> None:
        self.redelivered = bool(self.message.delivery_info.get("redelivered"))

    @property
    def size(self) -> int:
        """The size of the body in bytes; in characters if a virtual transport returns text."""
        return len(self.message.body or b"")


class Unanswered(Exception):
    """A worker could not finish a load, because its database is unavailable. The load is taken again.

    Attributes:
        load: its deliveries without an answer, in their order.
        seconds: the backoff before they are taken again; 0.0 if the whole database is unavailable, so that all its lanes pause.
    """

    def __init__(self, load: list[Delivery], seconds: float) -> None:
        super().__init__(f"{len(load)} deliveries are unanswered")
        self.load = load
        self.seconds = seconds


class Answer(NamedTuple):
    """Acknowledge a delivery, or run it `again`; not before `at` (monotonic)."""

    delivery: Delivery
    again: bool
    at: float


class Answers:
    """Put by the workers, and taken by the connection's thread."""

    def __init__(self) -> None:
        self._given: deque[Answer] = deque()
        self._later: list[Answer] = []
        self._bell = Bell()

    def __bool__(self) -> bool:
        return bool(self._given)

    def put(self, outcomes: Sequence[tuple[Delivery, Outcome]]) -> None:
        """A delivery without an outcome stays here, because the broker counts each redelivery."""
        now = monotonic()
        for delivery, outcome in outcomes:
            delay = 0.0
            if outcome is Outcome.DEFERRED:
                delay = _DEFERRED_SECONDS
            elif outcome is Outcome.UNSTORED:
                shortest, longest = _UNSTORED_SECONDS
                # As long as it has been here: the delay doubles.
                delay = min(max(now - delivery.at, shortest), longest)
            self._given.append(Answer(delivery, again=delay > 0, at=now + delay))
        # Not for each answer: the connection's thread takes several at its next tick, or when a worker is idle.
        if len(self._given) >= _WAKE_UP_ANSWERS:
            self._bell.ring()

    def push(self) -> None:
        """A worker is idle."""
        if self._given:
            self._bell.ring()

    def take(self) -> list[Answer]:
        """Those that are due, of deliveries whose channels are open: the broker delivers the others again."""
        now = monotonic()
        answers = [*self._later, *(self._given.popleft() for _ in range(len(self._given)))]
        current = [answer for answer in answers if answer.delivery.acks.is_open]
        self._later = [answer for answer in current if answer.at > now]
        return [answer for answer in current if answer.at <= now]

    def wait(self, seconds: float, stop: StopRequest, *, also: Any) -> None:
        """Wait for several answers, or for `also` to be readable."""
        if len(self._given) < _WAKE_UP_ANSWERS:
            self._bell.wait(seconds, None if stop else stop, also=also)
