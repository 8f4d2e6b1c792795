"""How a worker handles a load of deliveries: read, receive and answer each."""

import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import kombu
from django.db import DatabaseError, connections

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import Reminder, escaping_logger
from exactly_once.wire.body import Undecodable
from exactly_once.wire.envelope import COMPRESSION, OPAQUE, Envelope, from_delivery
from exactly_once.wire.text import describe
from inbox.conf import InboxOptions
from inbox.consumer.answers import Delivery, Unanswered
from inbox.consumer.runner import Runner
from inbox.consumer.topology import queue_name
from inbox.handlers.handler import Handler
from inbox.limits.shedder import shedder_of
from inbox.receiving.admit import admit
from inbox.receiving.in_hand import Name, in_hand, lost_sessions
from inbox.receiving.outcomes import failure_of, store_failure
from inbox.receiving.parking import park
from inbox.receiving.reading import Unidentifiable, message_of, read, read_unread
from inbox.receiving.receive import receive
from inbox.states import Outcome
from inbox.store import counting
from inbox.store.dialect import TABLE
from inbox.store.message_rows import ConcurrentDuplicate
from inbox.transactions.arrival import Arrival
from inbox.transactions.running import DatabaseUnavailable

logger = escaping_logger(__name__)


_REFUSAL_REMEDY = f"Look for a trigger, a rule or a damaged index of {TABLE} that refuses the row, and remove it."
_TIMED = (Outcome.HANDLED, Outcome.STORED)
_MOST_KEYS = 10_000
Answers = Sequence[tuple[Delivery, Outcome]]
_More = Callable[[], Delivery | None]
_LARGEST_BEHIND = 64 * 1024
"""Bytes of the largest body that is decoded while the transaction of another message is open."""


class _Run(NamedTuple):
    """How a part of a load is run.

    Attributes:
        do: returns None if the part must be run in smaller parts.
        handles: it calls the handler.
    """

    do: Callable[[list[Delivery]], list[Outcome] | None]
    handles: bool = False


_Parts = deque[tuple[list[Delivery], _Run]]


class _Behind:
    """The deliveries behind the only one of `part`. Each takes its place when the one before it has had its effect.

    Attributes:
        left: one that was taken, and is to be received by itself.
        held: those that this process has in hand.
    """

    def __init__(
        self,
        more: _More,
        read: Callable[[Delivery], Arrival],
        ended: Callable[[Sequence[Delivery], Sequence[Outcome]], object],
    ) -> None:
        self._more, self._read, self._ended = more, read, ended
        self.part: list[Delivery] = []
        self.left: list[Delivery] = []
        self.held: set[Name] = set()

    def take(self) -> Arrival | None:
        if self.left or (one := self._more()) is None:
            return None
        self.left.append(one)
        if one.redelivered or not one.acks.is_open or one.size > _LARGEST_BEHIND or COMPRESSION in (one.message.headers or {}):
            return None
        try:
            one.arrival = self._read(one)
        except Exception as error:  # noqa: BLE001 - it must not fail the message before it
            logger.debug("A delivery cannot be read behind another one: %s", describe(error))
            return None
        if one.arrival.refused or one.arrival.unread or lost_sessions.are_among([one.arrival.row]):
            return None
        if (names := in_hand.take([one.arrival.row])) is None:
            return None
        self.held |= names
        return one.arrival

    def advance(self, outcome: Outcome = Outcome.HANDLED) -> None:
        self._ended([*self.part], [outcome])
        self.part[0] = self.left.pop()


class Reception:
    """Called by worker threads, each with a load of one lane.

    Args:
        runner: runs the messages that are stored here, and shares the record of databases that cannot store.
        answer: records the outcomes of deliveries.
    """

    def __init__(self, options: InboxOptions, runner: Runner, answer: Callable[[Answers], None]) -> None:
        self._options = options
        self._runner = runner
        self._answer = answer
        self._outages = runner.outages
        self._refusals: defaultdict[str, Reminder] = defaultdict(Reminder)
        self._counting = threading.Lock()
        self._latest: OrderedDict[tuple[object, str], str] = OrderedDict()
        self._storing = _Run(self._store)
        self.outcomes: Counter[Outcome] = Counter()

    def receive(self, load: list[Delivery], more: _More | None = None) -> None:
        """Run a load until each delivery is answered, or is left with the broker; one that has waited too long is stored.

        Args:
            more: takes the next delivery of the queue, for this thread; None if there is none that it should run now.

        Raises:
            Unanswered: the database is unavailable, so these deliveries are unchanged. This thread does not wait for the
                database, because handlers of other databases need it.
        """
        handler = load[0].handler
        behind = _Behind(more, self._read, self._ended) if more is not None and handler.may_follow else None
        try:
            parts = self._parts(handler, self._read_all(handler, load), behind)
            self._run_all(handler, parts, () if behind is None else behind.left)
        finally:
            if behind is not None:
                in_hand.end(behind.held)
        if behind is not None and behind.left:
            self.receive(behind.left)

    def check(self, load: list[Delivery]) -> list[Delivery]:
        """Shed the droppable deliveries of a load, and store each as shed; return the others, in order.

        Raises:
            Unanswered: see `receive`; it includes the others.
        """
        handler = load[0].handler
        shedder, shed = shedder_of(handler), defaultdict[str, list[Delivery]](list)
        to_handle: list[Delivery] = []
        for one in self._read_all(handler, load):
            arrival, reason = one.arrival, ""
            if shedder is not None and shedder.is_shedding and not (arrival.refused or arrival.unread):
                # What cannot be read again, as by a class that looks at the time, is not shed: its run decides.
                with suppress(Undecodable, DatabaseUnavailable):
                    reason = shedder.why_shed(message_of(handler, arrival.envelope, self._options, biz_id=arrival.row.biz_id))
            (shed[reason] if reason else to_handle).append(one)
        self._run_all(handler, deque((some, _Run(partial(self._shed, reason))) for reason, some in shed.items()), to_handle)
        return to_handle

    def _run_all(self, handler: Handler, parts: _Parts, others: Sequence[Delivery] = ()) -> None:
        """Run and answer all parts of a load.

        Raises:
            Unanswered: see `receive`; it includes the `others`.
        """
        while parts:
            part, run = parts.popleft()
            if run.handles and monotonic() - part[0].at > self._options.longest_silence:
                # It must be stored and not run, before the broker's `consumer_timeout`.
                run = self._storing
            halve = handler.kind.gets_list
            try:
                ended = self._run_part(part, run)
            except DatabaseUnavailable as outage:
                # The later messages of an ordered queue must wait in any case.
                if handler.ordered or not outage.refused or not self._outages.can_store(handler.using):
                    raise self._unanswered(handler, chain(part, *(later for later, _ in parts), others), outage) from outage
                ended, halve = self._defer_unstored(part, outage), True
            except DatabaseError:
                # The values of single deliveries cause it. Halves find them with the fewest transactions.
                ended, halve = False, True
            if not ended:
                half = len(part) // 2
                smaller = [part[:half], part[half:]] if halve else [[one] for one in part]
                parts.extendleft((some, run) for some in reversed(smaller))

    def _parts(self, handler: Handler, load: list[Delivery], behind: _Behind | None = None) -> _Parts:
        """Split the load into parts that run the same way."""
        if handler.is_stored_first:
            return deque([(load, self._storing)] if load else [])
        parts: _Parts = deque()
        receiving = _Run(partial(self._receive, behind), handles=True)
        together: list[Delivery] = []
        for one in load:
            if one.arrival.refused or one.arrival.unread or handler.lease:
                parts.append(([one], receiving))
            else:
                together.append(one)
        if together:
            parts.appendleft((together, receiving))
        return parts

    def _receive(self, behind: _Behind | None, part: list[Delivery]) -> list[Outcome] | None:
        handler, arrivals = part[0].handler, [one.arrival for one in part]
        queue = behind if len(part) == 1 else None
        if queue is not None:
            queue.part = part
        return receive(handler, arrivals, self._options, acknowledge=partial(self._acknowledge, part), queue=queue)

    def _store(self, part: list[Delivery]) -> list[Outcome]:
        stored = admit(part[0].handler, [one.arrival for one in part], self._options)
        self._runner.ring()
        return stored

    def _shed(self, reason: str, part: list[Delivery]) -> list[Outcome]:
        return admit(part[0].handler, [one.arrival for one in part], self._options, shed=reason)

    def _run_part(self, part: list[Delivery], run: _Run) -> bool:
        """Run a part and answer its deliveries. False: it must be run in smaller parts.

        Raises:
            DatabaseUnavailable: no outcome was stored.
            django.db.Error: the database refuses the values of one of several deliveries.
        """
        handler = part[0].handler
        if self._runner.stop.is_set or not part[0].acks.is_open:
            return True
        if (outcomes := self._run(part, run)) is None:
            return False
        for one, outcome in zip(part, outcomes, strict=True) if handler.ordered else ():
            if outcome is Outcome.STORED:
                self._check_order(one)
        self._ended(part, outcomes)
        return True

    def _ended(self, part: Sequence[Delivery], outcomes: Sequence[Outcome]) -> None:
        """Count the outcomes, and the latencies of first deliveries, and answer the deliveries.

        The effect of a stored message is timed where it is run.
        """
        with self._counting:
            for outcome in outcomes:
                self.outcomes[outcome] += 1
        handler, now, received = part[0].handler, monotonic(), []
        for one, outcome in zip(part, outcomes, strict=True):
            if outcome in _TIMED and not one.redelivered:
                envelope = one.arrival.envelope
                received.append((envelope.deliver_at or envelope.created_at, now - one.at, outcome is Outcome.HANDLED))
        if received:
            counting.time_received(handler.using, handler.name, received)
        # Under a lease, a delivery is alone.
        if not part[0].is_acknowledged:
            self._answer(list(zip(part, outcomes, strict=True)))

    def _run(self, part: list[Delivery], run: _Run) -> list[Outcome] | None:
        handler = part[0].handler
        try:
            outcomes = run.do(part)
        except DatabaseUnavailable:
            raise
        except BaseException as error:
            if len(part) > 1 and isinstance(error, ConcurrentDuplicate):
                return None
            if len(part) > 1 and isinstance(error, DatabaseError):
                raise
            # No error may end the worker while the process still receives.
            logger.exception(
                "handler %s: unexpected error in the consumer while it received %d deliveries.", handler.name, len(part)
            )
            connections.close_all()
            if handler.ordered:
                raise DatabaseUnavailable(f"the deliveries of {handler.name} cannot be stored: {describe(error)}") from error
            return [self._failed(one, error) for one in part]
        if self._outages.items:
            self._outages.end(handler.name)
        if self._outages.beside and run.handles and outcomes is not None:
            self._outages.end_beside(handler.name)
        if outcomes is not None and Outcome.DEFERRED in outcomes:
            return [self._deferred(one) if was is Outcome.DEFERRED else was for one, was in zip(part, outcomes, strict=True)]
        return outcomes

    def _check_order(self, delivery: Delivery) -> None:
        """Report a message that the broker has returned to its queue only after it had delivered a later one of its key."""
        envelope = delivery.arrival.envelope
        order = (delivery.message.delivery_info.get("consumer_tag"), envelope.key)
        with self._counting:
            if envelope.key and not delivery.redelivered:
                self._latest[order] = envelope.id
                self._latest.move_to_end(order)
                if len(self._latest) > _MOST_KEYS:
                    self._latest.popitem(last=False)
            later = self._latest.get(order) if delivery.redelivered else None
        if later is not None:
            logger.error(
                "handler %s: the order of the key %r is broken: the broker delivered message %s again only after message %s, "
                "which is later in the queue and was stored first. Both are handled. Check the effects of this key, and let no "
                "other program read the queue %s.",
                delivery.handler.name,
                envelope.key,
                envelope.id or "without id",
                later or "without id",
                queue_name(delivery.handler, self._options),
            )

    def _acknowledge(self, part: Sequence[Delivery]) -> None:
        """Acknowledge before the handler has ended."""
        one = part[0]
        one.is_acknowledged = True
        self._answer([(one, Outcome.STORED)])

    def _deferred(self, one: Delivery) -> Outcome:
        """Store a delivery whose concurrent duplicate is being handled. If that fails, it is tried again shortly."""
        handler = one.handler
        # In an ordered queue, the next delivery must not be stored before this one.
        if handler.ordered or one.arrival.refused:
            return Outcome.DEFERRED
        try:
            return park(handler, one.arrival, self._options)
        except Exception as error:  # noqa: BLE001 - the other deliveries have their outcome
            logger.debug("handler %s: a concurrent duplicate cannot be stored: %s", handler.name, describe(error))
            return Outcome.DEFERRED

    def _failed(self, one: Delivery, error: BaseException) -> Outcome:
        """Store the failure of a delivery outside its handler, so that operators see it and its attempts are limited."""
        handler = one.handler
        try:
            failure = failure_of(one.arrival, error, 1, self._options)
            return store_failure(handler, one.arrival.row, failure, self._options)
        except DatabaseUnavailable:
            raise
        except ConcurrentDuplicate:
            return Outcome.DEFERRED
        except BaseException:
            logger.exception(
                "handler %s: a delivery cannot be stored. It stays unacknowledged and is tried again.", handler.name
            )
            connections.close_all()
            return Outcome.UNSTORED

    def _defer_unstored(self, part: Sequence[Delivery], outage: DatabaseUnavailable) -> bool:
        """Defer a delivery that cannot be stored, so that the others continue. False: the part has several deliveries.

        If every message of a handler is deferred, the prefetch limit stops the handler.
        """
        if len(part) > 1:
            return False
        (delivery,) = part
        if self._refusals[delivery.handler.name].is_due():
            logger.error(
                "handler %s: message %s cannot be stored, while other messages can (%s). %s It stays unacknowledged and is "
                "tried again, at last every minute; no message is lost.",
                delivery.handler.name,
                delivery.arrival.envelope.id or "without id",
                outage,
                outage.remedy or _REFUSAL_REMEDY,
            )
        with self._counting:
            self.outcomes[Outcome.UNSTORED] += 1
        self._answer([(delivery, Outcome.UNSTORED)])
        return True

    def _unanswered(self, handler: Handler, left: Iterable[Delivery], outage: DatabaseUnavailable) -> Unanswered:
        seconds, everywhere = self._outages.pause(handler.using, handler.name, outage)
        return Unanswered(sorted(left, key=lambda delivery: delivery.at), 0.0 if everywhere else seconds)

    def _read_all(self, handler: Handler, load: list[Delivery]) -> list[Delivery]:
        """Read the deliveries of open channels, and return them.

        Raises:
            Unanswered: see `receive`.
        """
        current = [delivery for delivery in load if delivery.acks.is_open]
        for delivery in current:
            try:
                delivery.arrival = self._read(delivery)
            except DatabaseUnavailable as outage:
                raise self._unanswered(handler, current, outage) from outage
        return current

    def _read(self, delivery: Delivery) -> Arrival:
        handler, refused = delivery.handler, ""
        try:
            envelope = envelope_of(delivery.message)
        except Exception as error:  # noqa: BLE001 - a foreign producer's message must not end the worker
            envelope = _opaque(delivery.message)
            refused = f"The delivery cannot be read: {type(error).__name__}: {describe(error)}"
        try:
            return read(handler, envelope, self._options, refused=refused, redelivered=delivery.redelivered)
        except Unidentifiable:
            return read_unread(handler, envelope, self._options, redelivered=delivery.redelivered)


def envelope_of(message: kombu.Message) -> Envelope:
    """The delivered message with its attributes read; the body is not decoded."""
    return from_delivery(
        properties={**message.properties, "content_type": message.content_type},
        headers=message.headers or {},
        body=body_of(message),
        routing_key=str(message.delivery_info.get("routing_key") or ""),
    )


def body_of(message: kombu.Message) -> bytes:
    """The body as bytes; a virtual transport may return text.

    Raises:
        TypeError: it is neither bytes nor text.
    """
    body: Any = message.body
    return body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body)


def _opaque(message: kombu.Message) -> Envelope:
    """The envelope of a delivery in an unknown format: its id, and its body for operators."""
    properties = {"message_id": message.properties.get("message_id"), "content_type": OPAQUE}
    try:
        body = body_of(message)
    except TypeError:
        body = str(message.body).encode("utf-8", "surrogatepass")
    return from_delivery(
        properties=properties, headers={}, body=body, routing_key=str(message.delivery_info.get("routing_key") or "")
    )
