"""`local://`: no broker at all, for this service's own handlers.

The relay's pass *hands over* instead of sending: in its own transaction it stores one inbox row per subscribed handler and
marks the message published. One database transaction, no network, no slow code inside. The runner executes the rows, each in
a transaction of its own. Durable and exactly once, on SQLite too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from django.db import DatabaseError, transaction

from inbox.conf import inbox_options
from inbox.consumer.heartbeat import RunnerHeartbeats
from inbox.handlers.handler import Handler
from inbox.handlers.registry import registry
from inbox.receiving.admit import hand_over
from inbox.receiving.reading import read
from inbox.runner import Runner
from inbox.store.rows import TwinBusy
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
        for message in messages:
            if monotonic() > deadline:
                break
            verdicts[message.position] = self._send_one(message)
        transaction.on_commit(self._runner.ring, using=self._alias, robust=True)
        return Sent(verdicts=verdicts)

    def idle(self) -> None:
        pass

    def close(self) -> None:
        pass

    def companions(self) -> Sequence[Companion]:
        return self._runner, RunnerHeartbeats(self._runner)

    def _send_one(self, message: OutgoingMessage) -> Verdict:
        # A savepoint each: one bad row must not fail the batch.
        try:
            with transaction.atomic(using=self._alias):
                return self._hand_over(message)
        except TwinBusy:
            return Verdict(PublishOutcome.UNKNOWN, "an earlier copy is being run right now")
        except DatabaseError as error:
            if not is_about_values(error):
                raise
            return Verdict(PublishOutcome.REFUSED, f"the inbox cannot store it: {describe(error)}")
        except Exception as error:  # noqa: BLE001 - a row that was damaged by hand may hold anything
            return Verdict(PublishOutcome.REFUSED, f"it cannot be handed over: {describe(error)}")

    def _strangers(self, handlers: Sequence[Handler]) -> Sequence[Handler]:
        """Those that cannot be handed to, because they write to another database."""
        return [handler for handler in handlers if handler.using != self._alias]

    def _hand_over(self, message: OutgoingMessage) -> Verdict:
        envelope = message.envelope
        if message.wire is not None:
            return Verdict(
                PublishOutcome.REFUSED,
                f"{envelope.topic} is in the form of another protocol, and local:// hands over to this service's own handlers; "
                "set OUTBOX['BROKER_URL'] to the broker that its workers receive from",
            )
        handlers = registry.for_topic(envelope.topic)
        if not handlers:
            return Verdict(
                PublishOutcome.RETURNED,
                f"unroutable: no handler takes the topic {envelope.topic!r}; they are found in handlers.py of installed apps",
            )
        if strangers := self._strangers(handlers):
            return Verdict(
                PublishOutcome.REFUSED,
                f"the handler {strangers[0].name} writes to the database {strangers[0].using!r}, but local:// hands over "
                f"inside one transaction of {self._alias!r}; use a broker between databases",
            )
        options = inbox_options()
        for handler in handlers:
            hand_over(handler, read(handler, envelope, options))
        return CONFIRMED
