"""kombu's other transports (Redis, SQS, …): one `Producer.publish` at a time.

They have no publisher confirms: a publish that returns was accepted by the server's socket, and nothing more is known. The
broker would silently drop a message to a topic without a bound queue, so the transport reads the binding table first.
"""

from collections.abc import Collection, Sequence
from typing import Any

import kombu
from kombu.transport.virtual import Channel as VirtualChannel

from exactly_once.conf.app_options import DEFAULT_TLS, TlsOptions
from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.transport.broker import (
    EXCHANGE_TYPE,
    BrokerConnection,
    connection_attempts,
    connection_options,
    failures_of,
    is_refusal,
    scheme_of,
)
from exactly_once.transport.interface import (
    CONFIRMED,
    BrokerRefused,
    BrokerUnavailable,
    Capabilities,
    OutgoingMessage,
    PublishOutcome,
    Sent,
    Transport,
    Verdict,
)
from exactly_once.wire.envelope import Envelope
from exactly_once.wire.formats import Wire
from exactly_once.wire.text import describe

logger = escaping_logger(__name__)

_LEAST_SECONDS = 0.001
_REDIS = {"redis", "rediss", "sentinel", "valkey", "valkeys"}
_UNDURABLE = {"memory", "filesystem", "sqla", "sqlalchemy", "sqlite", "confluentkafka", "pyro"}


def capabilities_of(url: str) -> Capabilities:
    """The capabilities of kombu's transport for `url`."""
    scheme = scheme_of(url)
    if scheme in _UNDURABLE:
        return Capabilities(
            confirms=False,
            durable=False,
            weakness=f"{scheme}:// loses messages when a process dies",
        )
    if scheme in _REDIS:
        return Capabilities(
            confirms=False,
            weakness="Redis has no publisher confirms, keeps messages only as durably as it is configured (appendfsync), and "
            "may lose one message per consumer crash",
        )
    return Capabilities(confirms=False, weakness=f"{scheme}:// has no publisher confirms that kombu can see")


class VirtualTransport(Transport):
    """Publishes through any kombu transport, one message after the other."""

    def __init__(self, url: str, *, alias: str, exchange: str, tls: TlsOptions = DEFAULT_TLS) -> None:
        self.capabilities = capabilities_of(url)
        self._url, self._tls = url, tls
        self._exchange = exchange
        self._connection: kombu.Connection | None = None
        self._channel: Any = None
        self._producer: Any = None

    def connect(self) -> None:
        if self._connection is not None:
            return
        connection = BrokerConnection(self._url, tls=self._tls, **connection_options(self._url))
        try:
            connection.ensure_connection(**connection_attempts(self._url))
            self._channel = connection.channel()
            self._producer = kombu.Producer(self._channel)
            self._channel.exchange_declare(self._exchange, EXCHANGE_TYPE, durable=True, auto_delete=False)
        except failures_of(connection) as error:
            connection.collect(socket_timeout=1.0)
            raise (BrokerRefused if is_refusal(error) else BrokerUnavailable)(describe(error)) from error
        self._connection = connection

    def send(self, messages: Sequence[OutgoingMessage], deadline: float, *, ends_early: bool = False) -> Sent:
        verdicts: dict[int, Verdict] = {}
        failures = failures_of(self._connection)
        for message in messages:
            if monotonic() > deadline:
                break
            began_at = monotonic()
            try:
                verdicts[message.position] = self._send_one(message)
                self.round_trip = monotonic() - began_at
            except failures as error:
                self.close()
                return Sent(verdicts=verdicts, broken=describe(error))
            except Exception as error:  # noqa: BLE001 - the connection works, so this message cannot be sent
                verdicts[message.position] = Verdict(PublishOutcome.REFUSED, f"it cannot be sent: {describe(error)}")
        return Sent(verdicts=verdicts)

    def close(self) -> None:
        connection, self._connection, self._channel, self._producer = self._connection, None, None, None
        if connection is not None:
            try:
                connection.close()
            except failures_of(connection) as error:
                logger.debug("Closing the broker connection: %s", describe(error))

    def _send_one(self, message: OutgoingMessage) -> Verdict:
        envelope = message.envelope
        if message.wire is not None:
            return self._send_formed(envelope, Wire.from_text(message.wire))
        exchange = message.exchange or self._exchange
        bound = self._bound(exchange, envelope.topic)
        if bound is not None and message.queue and message.queue not in bound:
            # The queue of a handler is bound to the exchange of its project, even if this topic has its own here.
            bound = self._bound(self._exchange, envelope.topic) or ()
        if bound is not None and (not bound or message.queue not in {"", *bound}):
            which = f"the queue {message.queue!r} is not" if message.queue else "no queue is"
            return Verdict(
                PublishOutcome.RETURNED,
                f"unroutable: {which} bound to exchange {exchange!r} for topic {envelope.topic!r}",
            )
        self._producer.publish(
            envelope.body,
            exchange="" if message.queue else exchange,
            routing_key=message.queue or envelope.topic,
            headers=envelope.to_headers(),
            content_type=envelope.content_type,
            content_encoding="utf-8",
            message_id=envelope.id,
            type=envelope.topic,
            delivery_mode="persistent",
            # In seconds; kombu writes milliseconds.
            expiration=None if message.expires_in_seconds is None else max(message.expires_in_seconds, _LEAST_SECONDS),
            retry=False,
        )
        return CONFIRMED

    def _send_formed(self, envelope: Envelope, wire: Wire) -> Verdict:
        # A queue exists as soon as it holds a message, so every message to the default exchange is routable.
        bound = self._bound(wire.exchange, wire.routing_key, wire.exchange_type) if wire.exchange else None
        if bound is not None and not bound:
            return Verdict(
                PublishOutcome.RETURNED,
                f"unroutable: no queue is bound to exchange {wire.exchange!r} for topic {wire.routing_key!r}",
            )
        message = self._channel.prepare_message(
            envelope.body,
            priority=wire.priority,
            content_type=wire.content_type,
            content_encoding=wire.content_encoding,
            headers=dict(wire.headers),
            properties={**wire.properties, "message_id": envelope.id},
        )
        self._channel.basic_publish(message, exchange=wire.exchange, routing_key=wire.routing_key)
        return CONFIRMED

    def _bound(self, exchange: str, topic: str, exchange_type: str = EXCHANGE_TYPE) -> Collection[str] | None:
        """The queues that are bound for a topic; None if the broker does not show them."""
        channel = self._channel
        if not isinstance(channel, VirtualChannel):
            return None
        if exchange not in channel.state.exchanges:
            # Each process keeps its own list of exchanges and their types; the bindings are shared.
            channel.exchange_declare(exchange, exchange_type, durable=True)
        try:
            table = channel.get_table(exchange)
        except KeyError:
            return ()
        return set(channel.typeof(exchange).lookup(table, exchange, topic, None))
