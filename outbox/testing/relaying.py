"""Run the real relay in a test, with a transport that needs no broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.utils.module_loading import import_string

from exactly_once.process.logs import Reminder
from exactly_once.process.loop import StopRequest, Watchdog
from exactly_once.sql.connections import is_inside_a_transaction
from exactly_once.testing.database import require_tests
from exactly_once.testing.matching import decoded
from exactly_once.transport.broker import is_local
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
from exactly_once.wire.formats import Wire
from outbox.conf import outbox_options
from outbox.relay.heartbeat import Heartbeat
from outbox.relay.relay import Relay
from outbox.relay.releasing import Release
from outbox.relay.service import serve
from outbox.store.dialect import database_of
from outbox.transports import transport_class


@dataclass(frozen=True, kw_only=True)
class SentMessage:
    """A message as it is sent to the broker.

    Attributes:
        id: the message id.
        topic: its routing key, unless it is a Celery message.
        payload: decoded from the body; the body itself if it is not JSON.
        headers: all headers of the message: the publisher's own and the CloudEvents attributes, or those of Celery.
        body: the bytes.
        priority: the broker's message priority.
    """

    id: str
    topic: str
    payload: Any
    headers: Mapping[str, Any]
    body: bytes
    priority: int


def run_relay(
    *, using: str | None = None, handlers: bool = True, raise_errors: bool = True, reproducible: bool = False
) -> list[SentMessage]:
    """Relay until nothing is due, and run this project's handlers, callbacks and checkers; return the published messages.

    It does the same as `outbox_relay --drain`, without a broker. If the broker in the settings is `local://`, a message without
    a handler is not published, as in production. With any other broker every message is published, and the handlers of this
    project for it run as well.

    It does not wait for scheduled messages or later retries: see `travel`. It does not apply rates of topics, nor rate limits
    of handlers.

    Args:
        using: the database alias of the outbox.
        handlers: False publishes only, and runs none of this project's handlers.
        raise_errors: raise what a handler raised, after everything has been relayed and run. RetryLater is not raised.
        reproducible: work in this thread only, and do nothing by the clock: no heartbeat, housekeeping, callbacks or checkers.
            Two calls over equal data make the same commits, so that a test may interrupt each.

    Raises:
        Exception: what a handler raised, or why its transaction could not commit.
        ImportError: the broker is `local://`, and the inbox is not installed.
        RuntimeError: it is called inside `transaction.atomic()` (that of a test case is allowed), or not in a test.
    """
    require_tests("run_relay")
    alias = database_of(using)
    if is_inside_a_transaction(alias):
        raise RuntimeError(
            f"run_relay() was called inside transaction.atomic() on {alias!r}. A relay sees committed messages only: call it "
            "after that block. The transaction that a TestCase or pytest-django opens does not count."
        )
    transport = _TestTransport(alias, handlers=handlers)
    with transport.raising_errors() if raise_errors else nullcontext():
        if reproducible:
            _relay_alone(alias, transport)
        else:
            serve(alias, drain=True, transport=transport)
    return transport.sent


class _NoHeartbeat(Heartbeat):
    def beat(self) -> None:
        """Write nothing."""


class _LastWalk(Release):
    def step(self, idle_seconds: float) -> int:
        """Nothing by the clock: the last round of a relay walks over all keys."""
        return 0


def _relay_alone(alias: str, transport: _TestTransport) -> None:
    """Relay and run handlers in turn, because a handler may publish messages."""
    options, stop, found = outbox_options(), StopRequest(), True
    watchdog = Watchdog(limit=options.WATCHDOG)
    release, heartbeat = _LastWalk(alias, Reminder()), _NoHeartbeat(alias)
    relay = Relay(alias, transport, options, stop=stop, watchdog=watchdog, heartbeat=heartbeat, release=release)
    while found:
        relay.run(drain=True)
        found = transport.run_handlers(stop) > 0


class _TestTransport(Transport):
    """Replaces the broker: records the messages, and delivers them to this project's own handlers by `local://`."""

    capabilities = Capabilities(confirms=True, transactional=True, limited=False)

    def __init__(self, alias: str, *, handlers: bool) -> None:
        options = outbox_options()
        self.sent: list[SentMessage] = []
        self._is_local = handlers and is_local(options.BROKER_URL)
        self._local: Any = None
        if self._is_local:
            transport_class(options.BROKER_URL)
        if handlers and apps.is_installed("inbox"):
            # By its name, as in `outbox.transports`, because the outbox imports nothing of the inbox.
            self._local = import_string("inbox.testing.deliveries.LocalTestTransport")(alias, is_broker=self._is_local)

    def raising_errors(self) -> AbstractContextManager[None]:
        """At the end of the block, raise the first error of a handler in it."""
        return nullcontext() if self._local is None else self._local.raising_errors()

    def send(self, messages: Sequence[OutgoingMessage], deadline: float, *, ends_early: bool = False) -> Sent:
        handed = self._handed_over(messages, deadline)
        verdicts = {message.position: handed.get(message.position, CONFIRMED) for message in messages}
        self.sent += [_sent(message) for message in messages if verdicts[message.position].outcome is PublishOutcome.CONFIRMED]
        return Sent(verdicts=verdicts)

    def run_handlers(self, stop: StopRequest) -> int:
        return 0 if self._local is None else int(self._local.run_handlers(stop))

    def companions(self) -> Sequence[Companion]:
        return () if self._local is None else self._local.companions()

    def _handed_over(self, messages: Sequence[OutgoingMessage], deadline: float) -> dict[int, Verdict]:
        if self._local is None:
            return {}
        if self._is_local:
            return dict(self._local.send(messages, deadline).verdicts)
        # A broker also accepts messages for other services.
        ours = [message for message in messages if message.wire is None]
        verdicts = self._local.send(ours, deadline).verdicts
        return {position: verdict for position, verdict in verdicts.items() if verdict.outcome is not PublishOutcome.RETURNED}


def _sent(message: OutgoingMessage) -> SentMessage:
    envelope = message.envelope
    return SentMessage(
        id=envelope.id,
        topic=envelope.topic,
        payload=decoded(envelope.body),
        headers=envelope.to_headers() if message.wire is None else Wire.from_text(message.wire).headers,
        body=envelope.body,
        priority=message.priority,
    )
