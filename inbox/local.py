"""`local://`: no broker, only this service's own handlers.

The relay's pass *hands over* instead of sending: in its own transaction it stores one inbox row per subscribed handler and
marks the message published. This is one database transaction, without network or slow code. The runner executes the rows,
each in its own transaction. Messages are durable and effects happen exactly once, on SQLite too.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from django.db import DatabaseError, transaction

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.sql.faults import is_about_values
from exactly_once.sql.schema import is_missing
from exactly_once.transport.interface import (
    CONFIRMED,
    Capabilities,
    Companion,
    OutgoingMessage,
    PublishOutcome,
    Sent,
    Transport,
    Verdict,
)
from exactly_once.upkeep.executing import Operations
from exactly_once.wire.formats import PUBLISHED_SETS
from exactly_once.wire.text import describe
from inbox.conf import inbox_options, outbox_keeps_history
from inbox.consumer.heartbeat import RunnerHeartbeats
from inbox.consumer.lanes import fitting
from inbox.consumer.runner import Runner
from inbox.consumer.topology import queue_name
from inbox.handlers.handler import Handler
from inbox.handlers.registry import registry
from inbox.housekeeping import databases, housekeepers
from inbox.receiving.admit import hand_over
from inbox.receiving.reading import read_unread
from inbox.store import handler_rows
from inbox.store.message_rows import ConcurrentDuplicate
from inbox.transactions.arrival import Arrival

logger = escaping_logger(__name__)


class LocalTransport(Transport):
    """Hands messages to the inbox of the same database.

    Args:
        is_past: it hands history over to a new handler, see `Starts`. Otherwise a handler that waits for its history is
            left out: it gets the message with it.
    """

    capabilities = Capabilities(confirms=True, transactional=True)

    def __init__(self, url: str, *, alias: str, exchange: str, is_past: bool = False) -> None:
        self._alias = alias
        self._is_past = is_past
        self._started: set[str] = set()
        self._runner = Runner(inbox_options())

    def send(self, messages: Sequence[OutgoingMessage], deadline: float, *, ends_early: bool = False) -> Sent:
        verdicts: dict[int, Verdict] = {}
        parts = deque(_in_parts(messages))
        while parts and monotonic() <= deadline:
            part = parts.popleft()
            if (sent := self._send_part(part)) is not None:
                verdicts |= sent
            else:
                half = len(part) // 2
                parts.extendleft([part[half:], part[:half]])
        transaction.on_commit(self._runner.ring, using=self._alias, robust=True)
        return Sent(verdicts=verdicts)

    def companions(self) -> Sequence[Companion]:
        return self._runner, RunnerHeartbeats(self._runner), Operations("inbox", databases()), *housekeepers()

    def _send_part(self, messages: Sequence[OutgoingMessage]) -> dict[int, Verdict] | None:
        """Hand over all messages, with one statement per handler; None if they must be handed over in smaller parts."""
        try:
            # A savepoint: one bad row must not fail the batch.
            with transaction.atomic(using=self._alias):
                return self._hand_over(messages)
        except Exception as error:
            if isinstance(error, DatabaseError) and (is_missing(error) or not is_about_values(error)):
                raise
            if len(messages) == 1:
                return {messages[0].position: _failed(error)}
            logger.debug("local transport: %d messages are handed over in smaller parts: %s", len(messages), describe(error))
        return None

    def _hand_over(self, messages: Sequence[OutgoingMessage]) -> dict[int, Verdict]:
        options = inbox_options()
        verdicts: dict[int, Verdict] = {}
        arrivals: dict[str, list[Arrival]] = {}
        starting = self._starting(messages)
        for message in messages:
            of_its_topic = [
                handler
                for handler in registry.for_topic(message.envelope.topic)
                if not message.queue or message.queue == queue_name(handler, options)
            ]
            refused = self._why_refused(message, of_its_topic)
            verdicts[message.position] = refused or CONFIRMED
            for handler in () if refused else of_its_topic:
                if handler.name in starting:
                    continue
                arrived = read_unread(handler, message.envelope, options, is_past=self._is_past)
                arrivals.setdefault(handler.name, []).append(arrived)
        for of_the_handler in arrivals.values():
            hand_over(of_the_handler[0].handler, *of_the_handler)
        return verdicts

    def _starting(self, messages: Sequence[OutgoingMessage]) -> Collection[str]:
        """The handlers of these messages that wait for their past."""
        topics = {message.envelope.topic for message in messages}
        wanting = registry.wanting_past(self._alias)
        unknown = {one.name: one.starts_at for one in wanting if topics & {*one.topics} and one.name not in self._started}
        if self._is_past or not unknown:
            return ()
        waiting = handler_rows.waiting_among(self._alias, unknown)
        self._started.update(unknown.keys() - waiting)
        # Without history it would not get them later, so it gets them before the rest of its past.
        return waiting if outbox_keeps_history() else ()

    def _elsewhere(self, handlers: Sequence[Handler]) -> Sequence[Handler]:
        """The handlers on another database, to which messages cannot be handed over."""
        return [handler for handler in handlers if handler.using != self._alias]

    def _why_refused(self, message: OutgoingMessage, handlers: Sequence[Handler]) -> Verdict | None:
        """Why the message cannot be handed over to all handlers of its topic; None if it can."""
        topic = message.envelope.topic
        if message.wire is not None:
            return Verdict(
                PublishOutcome.REFUSED,
                f"{topic} is in the format of another protocol, but local:// hands over only to this service's own handlers; "
                "set OUTBOX['BROKER_URL'] to the broker that its workers receive from",
            )
        if not handlers:
            if message.queue:
                return Verdict(PublishOutcome.RETURNED, f"unroutable: no handler here has the queue {message.queue!r}")
            end = topic.removeprefix(PUBLISHED_SETS)
            what = "define it" if end == topic else f"declare when_handled({end!r}, by=[...])"
            why = f"unroutable: no handler is registered for the topic {topic!r}; {what} in an installed app's handlers.py"
            return Verdict(PublishOutcome.RETURNED, why)
        if elsewhere := self._elsewhere(handlers):
            return Verdict(
                PublishOutcome.REFUSED,
                f"the handler {elsewhere[0].name} writes to the database {elsewhere[0].using!r}, but local:// hands over "
                f"in a transaction on {self._alias!r}; use a broker between databases",
            )
        return None


def _failed(error: Exception) -> Verdict:
    """The verdict of a message that raised `error`. A damaged row may raise anything."""
    if isinstance(error, ConcurrentDuplicate):
        return Verdict(PublishOutcome.UNKNOWN, "an earlier copy of the message is running")
    why = "the inbox cannot store it" if isinstance(error, DatabaseError) else "it cannot be handed over"
    return Verdict(PublishOutcome.REFUSED, f"{why}: {describe(error)}")


def _in_parts(messages: Sequence[OutgoingMessage]) -> Iterator[Sequence[OutgoingMessage]]:
    """Split the messages, in order, into parts for one statement each, by the size of their bodies."""
    while count := fitting(len(message.envelope.body) for message in messages):
        yield messages[:count]
        messages = messages[count:]


def starts_on(alias: str, *, is_local: bool) -> "Starts | None":
    """The starts on one database; None if no handler of this process wants its past from there."""
    return Starts(alias, is_local=is_local) if registry.wanting_past(alias) else None


class Starts:
    """The past of new handlers, for a relay: it hands over the messages of the outbox's history, in the order of publishing.

    A handler with `start_from="beginning"`, or an instant, receives nothing from its queue, where new messages wait, until its
    past is stored. A relay of its database stores it, see `outbox.relay.starting`, which finds `starts_on` by its name.

    The maximum message age does not apply to the past: a handler without messages has handled none, so none can have been
    purged.

    Args:
        is_local: the relay hands new messages over, too, so that no queue has to exist before the past is read.
    """

    def __init__(self, alias: str, *, is_local: bool) -> None:
        self._alias = alias
        self._is_local = is_local
        self._transport = LocalTransport("local://", alias=alias, exchange="", is_past=True)

    def waiting(self) -> Sequence[str]:
        """The handlers of this process that wait for their past."""
        wanted = {handler.name: handler.starts_at for handler in registry.wanting_past(self._alias)}
        if self._is_local:
            return sorted(handler_rows.waiting_among(self._alias, wanted))
        return [name for name in handler_rows.waiting_handlers(self._alias) if name in wanted]

    def lock(self, handler: str) -> Any | None:
        """Lock the start until the open transaction ends; None if another process has it, or it is complete."""
        return handler_rows.lock_start(self._alias, handler)

    def queue_of(self, handler: str) -> str:
        """The name of its queue, for messages that only this handler gets."""
        return queue_name(registry.selected(handler)[0], inbox_options())

    def topics_of(self, handler: str) -> Sequence[str]:
        return registry.topics_of(handler)

    def hand_over(self, messages: Sequence[OutgoingMessage], deadline: float) -> Sent:
        """Store messages in the open transaction."""
        return self._transport.send(messages, deadline)

    def update(self, start: Any, **columns: Any) -> None:
        handler_rows.update_start(self._alias, start, **columns)
