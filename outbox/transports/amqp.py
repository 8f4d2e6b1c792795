"""RabbitMQ: pipelined publisher confirms, with the project's own tracker and deadline.

py-amqp's `confirm_publish` is not used: it credits a late ack to the next message, and every heartbeat restarts its timeout.
This transport publishes a batch in one go, then collects acks, nacks and returns by delivery tag until a monotonic deadline.
The outcome of a message without an answer at the deadline is *unknown*. If the broker is only late, the connection stays open,
and the message is not sent again before its answer has come.

Any error of the channel or the socket closes the connection: py-amqp would silently reopen the channel without confirm mode
and restart its delivery tags. The transport uses one connection with one channel, in one thread, without consumers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct, pack
from typing import Any, Self

import kombu
from amqp.exceptions import NotFound, RecoverableConnectionError

from exactly_once.conf.app_options import DEFAULT_TLS, TlsOptions
from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.transport.broker import (
    BROKER_FAILURES,
    EXCHANGE_TYPE,
    BrokerConnection,
    Frame,
    connection_attempts,
    connection_options,
    dispatch_what_is_read,
    is_refusal,
    read_in_chunks,
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
from exactly_once.wire.formats import Wire
from exactly_once.wire.text import describe
from outbox.transports.confirms import ConfirmTracker
from outbox.transports.frames import METHOD, FrameWriter

logger = escaping_logger(__name__)

_TICK_SECONDS = 1.0
_GLANCE_SECONDS = 0.0001
_WRITE_BYTES = 64 * 1024
_WINDOW_BYTES = 1_000_000
_ACCESS_REFUSED, _NOT_FOUND = 403, 404
_FAULTS = {
    # The message: too large, invalid properties or an invalid frame.
    **dict.fromkeys((311, 406, 501, 502, 503, 505), PublishOutcome.REFUSED),
    # The destination.
    _ACCESS_REFUSED: PublishOutcome.FORBIDDEN,
    _NOT_FOUND: PublishOutcome.RETURNED,
}
"""Reply codes with which a broker closes the channel or the connection because of one message, and the message's outcome."""
_EXCHANGE_DECLARE = (40, 10)
_BASIC_ACK = pack(">HH", 60, 80)
_ACK_ARGUMENTS = Struct(">Q?")
"""Delivery tag and `multiple`, the only bit of its octet (AMQP 0-9-1, basic.ack)."""
_OVERDUE = "the broker did not confirm everything within the deadline"
_ALIVE_SECONDS = 2.0
_LATEST_SECONDS = 60.0
"""An answer that comes later than this after the deadline is given up, with its connection: it may never come."""

_UNASKED = (
    "The broker has confirmed message %s after its deadline, so it is delivered. Meanwhile it was settled by another relay, "
    "cancelled, rescheduled or changed."
)


@dataclass(slots=True)
class _Late:
    """A message without an answer at the deadline of its batch; its verdict when that has come.

    Its position alone does not identify it: a failover may give it to another message, and an operator may correct the message.
    """

    message: OutgoingMessage
    digest: bytes
    until: float
    verdict: Verdict | None = None

    @classmethod
    def of(cls, message: OutgoingMessage) -> Self:
        """Without its body, of which there may be many megabytes."""
        envelope = message.envelope
        kept = message._replace(envelope=envelope._replace(body=b""), priority=0, expires_in_seconds=None)
        return cls(kept, blake2b(envelope.body).digest(), monotonic() + _LATEST_SECONDS)

    def is_of(self, message: OutgoingMessage) -> bool:
        other = _Late.of(message)
        return (self.message, self.digest) == (other.message, other.digest)


class AmqpTransport(Transport):
    """Publishes to one topic exchange of RabbitMQ; every message is mandatory, persistent and confirmed.

    A message in the format of another protocol goes to the exchange in its `Wire`, also mandatory and confirmed.
    """

    capabilities = Capabilities(confirms=True)

    def __init__(self, url: str, *, alias: str, exchange: str, tls: TlsOptions = DEFAULT_TLS) -> None:
        self._url, self._tls = url, tls
        self._exchange = exchange
        self._connection: kombu.Connection | None = None
        self._amqp: Any = None
        self._channel: Any = None
        self._frames: FrameWriter
        self._tracker = ConfirmTracker()
        self._exchanges: set[str] = set()
        self._blocked: str | None = None
        self._late: dict[int, _Late] = {}
        self._is_overdue = False

    def connect(self) -> None:
        if self._connection is not None and self._blocked:
            self.idle()
            if self._blocked:
                raise BrokerUnavailable(self._blocked)
        if self._connection is not None and self._is_overdue:
            self._require_alive()
        if self._connection is None:
            self._open()

    def send(self, messages: Sequence[OutgoingMessage], deadline: float) -> Sent:
        refused: dict[int, Verdict] = {}
        if self._late:
            refused.update(self.answers(messages))
            messages = [
                message for message in messages if message.position not in refused and message.position not in self._late
            ]
            if not messages:
                return Sent(verdicts=refused)
        broken: str | None = None
        suspected: list[int] = []
        suspicious = False
        behind = self._tracker.last_tag
        try:
            self._is_overdue = not self._publish(messages, deadline, refused)
            sent_at = monotonic()
            self._is_overdue = self._is_overdue or not self._await_confirms(deadline, behind)
            if not self._is_overdue:
                self.round_trip = monotonic() - sent_at
        except BROKER_FAILURES as error:
            broken = self._explained(error)
            # An earlier message may be the cause.
            suspicious = _code_of(error) in _FAULTS and not self._late.keys().isdisjoint(self._tracker.unanswered)
            suspected = [] if suspicious else self._suspected(error, messages)
            if len(suspected) == 1 and (_blames_a_destination(error) or len(self._tracker.unanswered) == 1):
                refused[suspected[0]] = Verdict(_FAULTS[_code_of(error)], f"the broker refuses it: {broken}")
        verdicts = self._collect()
        verdicts.update(refused)
        if self._is_overdue or self._blocked:
            unanswered = set(self._tracker.unanswered)
            self._late.update((message.position, _Late.of(message)) for message in messages if message.position in unanswered)
        if broken is None and not self._blocked:
            return Sent(verdicts=verdicts)
        if self._blocked:
            # The broker enqueues the contents of the socket's buffers when the alarm ends, even if this side disconnects. So
            # keep this connection until then: every new connection would add another batch of duplicates.
            return Sent(verdicts=verdicts, broken=self._blocked, suspicious=True)
        self._discard()
        return Sent(verdicts=verdicts, broken=broken, suspected=suspected, suspicious=suspicious)

    def unconfirmed(self) -> Mapping[int, str]:
        if not self._late:
            return {}
        self._collect()
        if self._is_given_up():
            self.idle()  # this process may have been frozen, and the answer may be in the socket
            self._collect()
        if self._is_given_up():
            logger.warning("The broker has not confirmed a message for %.0f s; the connection is given up.", _LATEST_SECONDS)
            self._discard()
        now = monotonic()
        for position in [position for position, late in self._late.items() if now > late.until]:
            self._forget(position)
        return {position: late.message.envelope.key for position, late in self._late.items() if late.verdict is None}

    def answers(self, messages: Iterable[OutgoingMessage]) -> Mapping[int, Verdict]:
        answers: dict[int, Verdict] = {}
        for message in messages if self._late else ():
            late = self._late.get(message.position)
            if late is not None and late.verdict is not None:
                if late.is_of(message):
                    answers[message.position] = late.verdict
                    del self._late[message.position]
                else:
                    self._forget(message.position)
        return answers

    def _is_given_up(self) -> bool:
        now = monotonic()
        return any(late.verdict is None and now > late.until for late in self._late.values())

    def _forget(self, position: int) -> None:
        """Drop an answer that no pass has asked for."""
        late = self._late.pop(position)
        if late.verdict == CONFIRMED:
            logger.info(_UNASKED, late.message.envelope.id)

    def idle(self) -> None:
        """Read pending frames and send a heartbeat; this finds a dead connection before the next batch."""
        if self._connection is None:
            return
        try:
            self._read(0.001)
        except BROKER_FAILURES as error:
            logger.info("The idle broker connection was lost (%s); the next pass opens a new one.", describe(error))
            self._discard()

    def close(self) -> None:
        # A broker that blocks publishers answers connection.close only after its alarm ends.
        if self._connection is not None and not self._blocked:
            try:
                self._connection.close()
            except BROKER_FAILURES as error:
                logger.debug("Closing the broker connection: %s", describe(error))
        self._discard()

    def _open(self) -> None:
        self._blocked = None
        self._tracker = ConfirmTracker()
        self._exchanges = {""}
        events = {"on_blocked": self._on_blocked, "on_unblocked": self._on_unblocked}
        try:
            self._connection = BrokerConnection(self._url, tls=self._tls, **connection_options(self._url, **events))
            self._connection.ensure_connection(**connection_attempts(self._url))
            # Stored here, because kombu's own `connection` attribute silently reconnects after this connection is closed.
            self._amqp = self._connection.connection
            self._channel = self._amqp.channel()
            self._channel.exchange_declare(self._exchange, EXCHANGE_TYPE, durable=True, auto_delete=False)
            asked_at = monotonic()
            self._channel.confirm_select()
            self.round_trip = monotonic() - asked_at
        except Exception as error:
            # Any exception: the server on that port may not speak AMQP.
            self._discard()
            raise (BrokerRefused if is_refusal(error) else BrokerUnavailable)(self._explained(error)) from error
        self._frames = FrameWriter(channel=self._channel.channel_id, exchange=self._exchange, frame_max=self._amqp.frame_max)
        read_in_chunks(self._amqp.transport)
        self._channel.events["basic_ack"].add(self._tracker.acked)
        self._channel.events["basic_nack"].add(self._tracker.nacked)
        self._channel.events["basic_return"].add(self._on_return)

    def _discard(self) -> None:
        connection = self._connection
        self._connection = self._amqp = self._channel = self._blocked = None
        self._is_overdue = False
        self._late = {position: late for position, late in self._late.items() if late.verdict is not None}
        if connection is not None:
            try:
                connection.collect(socket_timeout=1.0)
            except BROKER_FAILURES as error:
                logger.debug("Discarding a broker connection: %s", describe(error))

    def _require_alive(self) -> None:
        """Make sure that the broker is late and not unreachable, which the socket alone does not show for a long time."""
        try:
            with self._amqp.transport.having_timeout(_ALIVE_SECONDS):
                self._amqp.channel().close()
        except BROKER_FAILURES as error:
            self._discard()
            raise BrokerUnavailable(f"{_OVERDUE}, and does not answer: {describe(error)}") from error
        self._is_overdue = False

    def _collect(self) -> dict[int, Verdict]:
        """The new answers. Those of earlier batches are stored until their messages are claimed again.

        A failure counts, too: a message that is always returned late would otherwise be sent forever. If another relay has
        counted the failure of its own copy meanwhile, it costs the message one attempt too many.
        """
        verdicts = self._tracker.collect()
        for position in self._late.keys() & verdicts.keys():
            late = self._late[position]
            late.verdict, late.until = verdicts.pop(position), monotonic() + _LATEST_SECONDS
        return verdicts

    def _publish(self, messages: Sequence[OutgoingMessage], deadline: float, refused: dict[int, Verdict]) -> bool:
        """Write the messages; False if the deadline has passed before all were written."""
        buffer = bytearray()
        unwritten: list[OutgoingMessage] = []
        behind = self._tracker.last_tag
        unconfirmed_bytes = 0
        missing: set[str] = set()
        for message in messages:
            frames = self._encode(message, missing)
            if isinstance(frames, Verdict):
                refused[message.position] = frames
                continue
            unwritten.append(message)
            buffer += frames
            if len(buffer) < _WRITE_BYTES:
                continue
            unconfirmed_bytes += len(buffer)
            if not self._write(buffer, unwritten, deadline):
                return False
            while self._read(_GLANCE_SECONDS):
                pass
            if unconfirmed_bytes > _WINDOW_BYTES:
                # If the acks are not read, the broker stops writing them, and then stops reading.
                if not self._await_confirms(deadline, behind):
                    return False
                unconfirmed_bytes = 0
        return self._write(buffer, unwritten, deadline)

    def _encode(self, message: OutgoingMessage, missing: set[str]) -> bytes | Verdict:
        # Outside of the `try`: it asks the broker, and the connection may be lost.
        route = None
        if message.queue:
            route = self._route(message, missing)
        elif message.exchange and message.wire is None:
            if not self._exists(message.exchange, missing):
                return _no_exchange(message.exchange)
            route = message.exchange, message.envelope.topic
        try:
            if message.wire is None:
                return self._frames.publish(message, route)
            wire = Wire.from_text(message.wire)
            frames = self._frames.publish_formed(message.envelope, wire)
        except Exception as error:  # noqa: BLE001 - a row written by another program may hold anything
            return Verdict(PublishOutcome.REFUSED, f"it cannot be encoded: {describe(error)}")
        if not self._exists(wire.exchange, missing):
            return _no_exchange(wire.exchange)
        return frames

    def _route(self, message: OutgoingMessage, missing: set[str]) -> tuple[str, str]:
        """Exchange and routing key of a message for one queue. Partitions are behind an exchange with the queue's name."""
        if self._exists(message.queue, missing):
            return message.queue, message.envelope.topic
        return "", message.queue

    def _exists(self, exchange: str, missing: set[str]) -> bool:
        """Does the exchange exist? A publish to a missing exchange closes the channel and fails the whole batch.

        The check uses a separate channel. A positive answer is cached for the connection, a negative one for the batch.
        """
        if exchange in self._exchanges:
            return True
        if exchange in missing:
            return False
        channel = self._amqp.channel()
        try:
            channel.exchange_declare(exchange, EXCHANGE_TYPE, passive=True)
        except NotFound as error:
            if error.method_sig != _EXCHANGE_DECLARE:
                raise  # It answers an earlier publish, and closed the other channel.
            missing.add(exchange)
            return False
        finally:
            channel.close()
        self._exchanges.add(exchange)
        return True

    def _write(self, buffer: bytearray, unwritten: list[OutgoingMessage], deadline: float) -> bool:
        left = deadline - monotonic()
        if left <= 0 or self._blocked:
            return False
        # Only now, because the broker counts what it receives.
        for message in unwritten:
            self._tracker.sent(message.position, message.envelope.id)
        unwritten.clear()
        with self._amqp.transport.having_timeout(left):
            self._amqp.transport.write(buffer)
        self._amqp.bytes_sent += 1
        buffer.clear()
        return True

    def _await_confirms(self, deadline: float, behind: int) -> bool:
        """Wait for the confirms of the publishes behind a tag; False at the deadline."""
        while self._tracker.waits_behind(behind):
            left = deadline - monotonic()
            if left <= 0 or self._blocked:
                return False
            self._read(min(left, _TICK_SECONDS))
        return True

    def _read(self, seconds: float) -> bool:
        """Read pending frames; False on timeout. `drain_events` is not used: each frame restarts its timeout."""
        if not self._amqp.connected:
            raise RecoverableConnectionError("the broker closed the connection")
        try:
            with self._amqp.transport.having_timeout(seconds):
                frame = self._amqp.transport.read_frame()
            if self._take(frame):
                dispatch_what_is_read(self._amqp, self._take)
            came = True
        except TimeoutError:
            came = False
        self._amqp.heartbeat_tick()
        return came

    def _take(self, frame: Frame) -> bool:
        """Handle an ack without py-amqp's dispatch, which costs several times as much. Most frames are acks.

        Returns:
            Whether confirms are outstanding. If none are, the next read handles the remaining frames.
        """
        kind, channel, payload = frame
        if kind == METHOD and channel == self._channel.channel_id and payload.startswith(_BASIC_ACK):
            self._amqp.bytes_recv += 1  # py-amqp's heartbeat check reads this counter
            self._tracker.acked(*_ACK_ARGUMENTS.unpack_from(payload, len(_BASIC_ACK)))
        else:
            self._amqp.on_inbound_frame(frame)
        return self._tracker.waiting

    def _on_return(self, error: Exception, exchange: str, routing_key: str, message: Any) -> None:
        bound = f"no queue is bound to exchange {exchange!r} for topic {routing_key!r}"
        reason = f"unroutable: {bound if exchange else f'queue {routing_key!r} does not exist'}"
        self._tracker.returned(str(message.properties.get("message_id", "")), reason)

    def _on_blocked(self, reason: str) -> None:
        self._blocked = "it blocks publishers, probably because of a memory or disk alarm; see the broker's log"

    def _on_unblocked(self) -> None:
        self._blocked = None
        for late in self._late.values():
            late.until = monotonic() + _LATEST_SECONDS

    def _suspected(self, error: Exception, messages: Sequence[OutgoingMessage]) -> list[int]:
        """The positions of the messages that may have made the broker close the channel; empty for any other reason.

        RabbitMQ names the forbidden topic. It reads in order, so it stopped at the first message of that topic.
        """
        code = _code_of(error)
        if code not in _FAULTS or self._is_about_our_exchange(error):
            return []
        unanswered = set(self._tracker.unanswered)
        sent = [message for message in messages if message.position in unanswered]
        if code == _NOT_FOUND:
            # An exchange that was deleted after the check.
            sent = [message for message in sent if message.wire is not None or message.queue or message.exchange]
        named = [message for message in sent if f"topic '{message.envelope.topic}'" in str(error)]
        return [message.position for message in named[:1] or sent]

    def _is_about_our_exchange(self, error: Exception) -> bool:
        """Is the project's exchange as a whole forbidden or missing, not a single topic?"""
        whole = f"exchange '{self._exchange}'" in str(error) and "topic '" not in str(error)
        return whole and _blames_a_destination(error)

    def _explained(self, error: Exception) -> str:
        reason = describe(error)
        if self._is_about_our_exchange(error):
            return (
                f"{reason}; the user of OUTBOX['BROKER_URL'] needs the permissions to configure and to write to the exchange "
                f"{self._exchange!r}: rabbitmqctl set_permissions"
            )
        return reason


def _no_exchange(name: str) -> Verdict:
    return Verdict(PublishOutcome.RETURNED, f"unroutable: exchange {name!r} does not exist")


def _blames_a_destination(error: Exception) -> bool:
    return _code_of(error) in (_ACCESS_REFUSED, _NOT_FOUND)


def _code_of(error: Exception) -> int:
    """AMQP's reply code; 0 when the broker gave none."""
    return int(getattr(error, "code", None) or 0)
