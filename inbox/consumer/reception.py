"""What a worker does with a load of deliveries: read them, have them received, answer each."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import kombu
from django.db import connections

from inbox.batching import receive_together
from inbox.conf import InboxOptions
from inbox.consumer.lanes import Delivery
from inbox.handlers import Handler
from inbox.holding import store_for_later
from inbox.ordering import take_in
from inbox.outcomes import Received
from inbox.reading import Arrival, message_of, read
from inbox.receiving import receive
from inbox.shedding import receive_shed, shedder_of
from inbox.transactions import DatabaseAway, decided
from outbox.kernel.clock import monotonic
from outbox.kernel.envelope import OPAQUE, Envelope, Undecodable, from_delivery
from outbox.kernel.loop import StopRequest
from outbox.kernel.outage import Outage
from outbox.kernel.text import describe

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Read:
    """A delivery and what it says."""

    delivery: Delivery
    arrival: Arrival

    def again(self) -> _Read:
        """For another run: its handler gets a message anew, because it may have changed the payload of this one."""
        return replace(self, arrival=replace(self.arrival, message=None))


_Run = Callable[[list[_Read]], list[Received] | None]
"""Runs a part of a load; None when it must be run in smaller parts."""


class Reception:
    """Called by worker threads, each with a load of one lane.

    Args:
        is_current: is this epoch still the connection's? What came in another life is left alone.
        answer: take note of what became of a delivery.
        ring: something has been stored that is due now.
    """

    def __init__(
        self,
        options: InboxOptions,
        stop: StopRequest,
        *,
        is_current: Callable[[int], bool],
        answer: Callable[[Delivery, Received], None],
        ring: Callable[[], None],
    ) -> None:
        self._options = options
        self._stop = stop
        self._is_current = is_current
        self._answer = answer
        self._ring = ring
        self._closing = False
        self._outages: defaultdict[str, Outage] = defaultdict(partial(Outage, "the database"))
        self._counting = threading.Lock()
        self.received: Counter[Received] = Counter()

    def close(self) -> None:
        """Begin nothing more."""
        self._closing = True

    def receive(self, load: list[Delivery]) -> None:
        """Take a load to its end, each delivery of it to an answer, or leave it with the broker."""
        handler = load[0].handler
        parts = self._parts(handler, [_Read(delivery, self._read(delivery)) for delivery in load if self._is_wanted(delivery)])
        while parts:
            part, run = parts.popleft()
            if self._is_late(part):
                run = self._later(handler)
            if not self._end(part, run):
                anew = [one.again() for one in part]
                half = len(part) // 2
                smaller = [anew[:half], anew[half:]] if handler.batch else [[one] for one in anew]
                parts.extendleft(
                    (some, self._together(handler) if len(some) > 1 else self._singly(handler)) for some in reversed(smaller)
                )

    def hold(self, held: list[Delivery]) -> None:
        """Store deliveries that have waited here too long to stay unanswered."""
        for delivery in held:
            read_ = _Read(delivery, self._read(delivery))
            self._end([read_], self._later(delivery.handler))

    def sift(self, load: list[Delivery]) -> list[Delivery]:
        """Drop what may be dropped of a load, because too many wait, and write it down; the rest, in its order."""
        handler = load[0].handler
        shed: dict[str, list[_Read]] = {}
        kept: list[Delivery] = []
        for delivery in load:
            one = _Read(delivery, self._read(delivery))
            if reason := self._why_shed(handler, one.arrival):
                shed.setdefault(reason, []).append(one)
            else:
                kept.append(delivery)
        for reason, part in shed.items():
            self._end(part, self._shed(handler, reason))
        return kept

    def _parts(self, handler: Handler, load: list[_Read]) -> deque[tuple[list[_Read], _Run]]:
        """The load in parts that are run alike, in its order."""
        if handler.ordered:
            return deque([(load, self._in_order(handler))] if load else [])
        parts: deque[tuple[list[_Read], _Run]] = deque()
        together: list[_Read] = []
        for one in load:
            if one.arrival.refused or one.delivery.redelivered or handler.mode == "lease":
                parts.append(([one], self._singly(handler)))
            else:
                together.append(one)
        if together:
            parts.appendleft((together, self._together(handler) if len(together) > 1 else self._singly(handler)))
        return parts

    def _singly(self, handler: Handler) -> _Run:
        return lambda part: [receive(handler, one.arrival, self._options, redelivered=one.delivery.redelivered) for one in part]

    def _together(self, handler: Handler) -> _Run:
        return lambda part: receive_together(handler, [one.arrival for one in part], self._options)

    def _later(self, handler: Handler) -> _Run:
        def run(part: list[_Read]) -> list[Received]:
            stored = [
                receive(handler, one.arrival, self._options, redelivered=one.delivery.redelivered)
                if one.arrival.refused
                else store_for_later(handler, one.arrival, self._options, redelivered=one.delivery.redelivered)
                for one in part
            ]
            self._ring()
            return stored

        return run

    def _in_order(self, handler: Handler) -> _Run:
        def run(part: list[_Read]) -> list[Received]:
            taken = take_in(handler, [(one.arrival, one.delivery.redelivered) for one in part], self._options)
            self._ring()
            return taken

        return run

    def _shed(self, handler: Handler, reason: str) -> _Run:
        return lambda part: receive_shed(handler, [one.arrival for one in part], reason, self._options)

    def _why_shed(self, handler: Handler, arrival: Arrival) -> str:
        shedder = shedder_of(handler)
        if shedder is None or not shedder.is_shedding or arrival.refused:
            return ""
        return shedder.why_shed(message_of(arrival.envelope, self._options, biz_id=arrival.row.biz_id))

    def _is_late(self, part: list[_Read]) -> bool:
        """Have others of its load taken so long that it can only be stored before the broker takes us for dead?"""
        first = part[0].delivery
        return not first.handler.ordered and monotonic() - first.at > self._options.longest_silence

    def _is_wanted(self, delivery: Delivery) -> bool:
        return not self._closing and self._is_current(delivery.epoch)

    def _end(self, part: list[_Read], run: _Run) -> bool:
        """Run a part, again while the database is away, and answer. False: it must be run in smaller parts."""
        handler = part[0].delivery.handler
        owed: Callable[[], None] | None = None
        while self._is_wanted(part[0].delivery):
            try:
                if owed is not None:
                    decided(owed, handler.using)
                    owed = None
                became = run(part)
            except DatabaseAway as error:
                owed = error.owed or owed
                self._outages[handler.using].wait(error, self._stop)
                part = [one.again() for one in part]
                continue
            except BaseException:
                # Nothing may end the worker while the process goes on receiving.
                logger.exception("%s: a delivery met an error nobody foresaw; it goes back to the broker.", handler.name)
                connections.close_all()
                became = [Received.PUT_OFF] * len(part)
            else:
                self._outages[handler.using].over()
            if became is None:
                return False
            with self._counting:
                self.received.update(became)
            for one, received in zip(part, became, strict=True):
                self._answer(one.delivery, received)
            return True
        return True

    def _read(self, delivery: Delivery) -> Arrival:
        try:
            envelope, refused = envelope_of(delivery.message)
        except Exception as error:  # noqa: BLE001 - whatever a foreign producer thought of, it must not end the worker
            envelope, refused = _opaque(delivery.message), f"It cannot be read: {type(error).__name__}: {describe(error)}"
        return read(delivery.handler, envelope, self._options, refused=delivery.refused or refused)


def envelope_of(message: kombu.Message) -> tuple[Envelope, str]:
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


def _opaque(message: kombu.Message) -> Envelope:
    """What can be told of a delivery that says nothing in a form we know: its body, for people to look at."""
    body: Any = message.body
    if not isinstance(body, bytes):
        body = str(body).encode("utf-8", "surrogatepass")
    return from_delivery(properties={"content_type": OPAQUE}, headers={}, body=body, routing_key="")
