"""`local://`: no broker, only this service's own handlers.

The relay's pass *hands over* instead of sending: in its own transaction it stores one inbox row per subscribed handler and
marks the message published. This is one database transaction, without network or slow code. The runner executes the rows,
each in its own transaction. Messages are durable and effects happen exactly once, on SQLite too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from django.db import DatabaseError, transaction

from inbox.conf import inbox_options
from inbox.consumer.heartbeat import RunnerHeartbeats
from inbox.consumer.lanes import LOAD_BYTES
from inbox.handlers.handler import Handler
from inbox.handlers.registry import registry
from inbox.operations import executor
from inbox.receiving.admit import hand_over
from inbox.receiving.reading import Arrival, read
from inbox.runner import Runner
from inbox.store.rows import ConcurrentDuplicate
from outbox.database.faults import is_about_values
from outbox.kernel.clock import monotonic
from outbox.kernel.text import describe
from outbox.kernel.transport import CONFIRMED, Capabilities, Companion, OutgoingMessage, PublishOutcome, Sent, Verdict

logger = logging.getLogger(__name__)


class LocalTransport:
    """Hands messages to the inbox of the same database."""

    capabilities = Capabilities(confirms=True, transactional=True)

    def __init__(self, url: str, *, alias: str, exchange: str) -> None:
        self._alias = alias
        self._runner = Runner(inbox_options())

    def connect(self) -> None:
        pass

    def send(self, messages: Sequence[OutgoingMessage], deadline: float) -> Sent:
        verdicts: dict[int, Verdict] = {}
        for part in _in_parts(messages):
            if monotonic() > deadline:
                break
            together = self._send_together(part)
            for message in part if together is None else ():
                if monotonic() > deadline:
                    break
                verdicts[message.position] = self._send_one(message)
            verdicts.update(together or {})
        transaction.on_commit(self._runner.ring, using=self._alias, robust=True)
        return Sent(verdicts=verdicts)

    def idle(self) -> None:
        pass

    def close(self) -> None:
        pass

    def companions(self) -> Sequence[Companion]:
        return self._runner, RunnerHeartbeats(self._runner), executor()

    def _send_together(self, messages: Sequence[OutgoingMessage]) -> dict[int, Verdict] | None:
        """Hand over all of them, with one statement for each handler; None if one of them must be found and left out."""
        try:
            with transaction.atomic(using=self._alias):
                return self._hand_over(messages)
        except DatabaseError as error:
            if not is_about_values(error):
                raise
        except Exception as error:  # noqa: BLE001 - each is handed over alone then
            logger.debug("Handing over %d messages one by one: %s", len(messages), describe(error))
        return None

    def _send_one(self, message: OutgoingMessage) -> Verdict:
        # A savepoint each: one bad row must not fail the batch.
        try:
            with transaction.atomic(using=self._alias):
                return self._hand_over([message])[message.position]
        except ConcurrentDuplicate:
            return Verdict(PublishOutcome.UNKNOWN, "an earlier copy is being run right now")
        except DatabaseError as error:
            if not is_about_values(error):
                raise
            return Verdict(PublishOutcome.REFUSED, f"the inbox cannot store it: {describe(error)}")
        except Exception as error:  # noqa: BLE001 - a row that was damaged by hand may hold anything
            return Verdict(PublishOutcome.REFUSED, f"it cannot be handed over: {describe(error)}")

    def _hand_over(self, messages: Sequence[OutgoingMessage]) -> dict[int, Verdict]:
        options = inbox_options()
        verdicts: dict[int, Verdict] = {}
        arrivals: dict[str, list[Arrival]] = {}
        handlers: dict[str, Handler] = {}
        for message in messages:
            of_its_topic = registry.for_topic(message.envelope.topic)
            refused = self._why_refused(message, of_its_topic)
            verdicts[message.position] = refused or CONFIRMED
            for handler in () if refused else of_its_topic:
                handlers[handler.name] = handler
                arrivals.setdefault(handler.name, []).append(read(handler, message.envelope, options))
        for name, of_the_handler in arrivals.items():
            hand_over(handlers[name], *of_the_handler)
        return verdicts

    def _elsewhere(self, handlers: Sequence[Handler]) -> Sequence[Handler]:
        """The handlers that write to another database and so cannot get it."""
        return [handler for handler in handlers if handler.using != self._alias]

    def _why_refused(self, message: OutgoingMessage, handlers: Sequence[Handler]) -> Verdict | None:
        """Why not all handlers of its topic can get it; None if they can."""
        topic = message.envelope.topic
        if message.wire is not None:
            return Verdict(
                PublishOutcome.REFUSED,
                f"{topic} is in the form of another protocol, and local:// hands over to this service's own handlers; "
                "set OUTBOX['BROKER_URL'] to the broker that its workers receive from",
            )
        if not handlers:
            return Verdict(
                PublishOutcome.RETURNED,
                f"unroutable: no handler takes the topic {topic!r}; they are found in handlers.py of installed apps",
            )
        if elsewhere := self._elsewhere(handlers):
            return Verdict(
                PublishOutcome.REFUSED,
                f"the handler {elsewhere[0].name} writes to the database {elsewhere[0].using!r}, but local:// hands over "
                f"inside one transaction of {self._alias!r}; use a broker between databases",
            )
        return None


def _in_parts(messages: Sequence[OutgoingMessage]) -> Iterator[Sequence[OutgoingMessage]]:
    """The messages in their order, as many in each part as one statement should carry."""
    part: list[OutgoingMessage] = []
    size = 0
    for message in messages:
        size += len(message.envelope.body)
        if part and size > LOAD_BYTES:
            yield part
            part, size = [], len(message.envelope.body)
        part.append(message)
    if part:
        yield part
