"""RabbitMQ: pipelined publisher confirms, with the project's own tracker and deadline.

py-amqp's `confirm_publish` is not used: it credits a late ack to the next message, and every heartbeat restarts its timeout.
This transport publishes a batch in one go, then collects acks, nacks and returns by delivery tag until a monotonic deadline.
The outcome of a message without an answer at the deadline is *unknown*. If the broker is only late, the connection stays open,
and the answer is reported when it has come.

Any error of a channel or the socket closes the connection: py-amqp would silently reopen the channel without confirm mode
and restart its delivery tags. The transport uses one connection in one thread, without consumers, with one channel and one
more for each probe without an answer.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from struct import Struct, pack
from typing import Any

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
_LOST_WHILE_IDLE = "The idle broker connection was lost (%s); the next pass opens a new one."
_LOST = Verdict(PublishOutcome.UNKNOWN, "the connection was lost, or its channel given up")
_PATIENCE_ROUND_TRIPS = 20
_SHORTEST_PATIENCE_SECONDS, _LONGEST_PATIENCE_SECONDS = 0.25, 1.0
_ROUND_TRIPS_TO_OPEN = 2
_ALIVE_SECONDS = 2.0
_LATEST_SECONDS = 60.0
"""An answer that comes later than this after the deadline is given up, with its connection: it may never come."""


class _Channel:
    """A channel in confirm mode, and the publishes that await their confirms.

    Attributes:
        sent_at: when the last batch was begun.
        heard_at: when an answer was last noticed.
    """

    def __init__(self, amqp: Any, on_return: Callable[..., None]) -> None:
        self.channel = amqp.channel()
        self.tracker = ConfirmTracker()
        self.frames = FrameWriter(channel=self.channel.channel_id, frame_max=amqp.frame_max)
        self.sent_at = self.heard_at = monotonic()
        self._heard = 0
        self.channel.confirm_select()
        self.channel.events["basic_ack"].add(self.tracker.acked)
        self.channel.events["basic_nack"].add(self.tracker.nacked)
        self.channel.events["basic_return"].add(partial(on_return, self.tracker))

    def has_news(self) -> bool:
        """Has an answer come since the last call?"""
        if self.tracker.answered == self._heard:
            return False
        self._heard, self.heard_at = self.tracker.answered, monotonic()
        return True

    @property
    def is_silent(self) -> bool:
        """Has no answer been noticed since the last batch was begun?"""
        return self.heard_at < self.sent_at


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
        self._channels: list[_Channel] = []
        self._current: _Channel
        self._exchanges: set[str] = set()
        self._blocked: str | None = None
        self._news: dict[int, Verdict] = {}
        self._unblocked_at = 0.0
        self._is_overdue = False

    def connect(self) -> None:
        if self._connection is not None and self._blocked:
            self._read_pending()
            if self._blocked:
                raise BrokerUnavailable(self._blocked)
        if self._connection is not None and self._is_overdue:
            self._require_alive()
        if self._connection is None:
            self._open()

    def send(self, messages: Sequence[OutgoingMessage], deadline: float, *, ends_early: bool = False) -> Sent:
        return self._send(self._main, messages, deadline, self._patience if ends_early else inf)

    def probe(self, message: OutgoingMessage, deadline: float) -> Sent:
        """Send a message on a channel of its own, see `_require_alive`."""
        sent = Sent()
        try:
            with self._amqp.transport.having_timeout(_ALIVE_SECONDS):
                channel = self._opened()
            # It stays if there is no answer. A broker that blocks publishers may answer later, too.
            self._channels.append(channel)
            sent = self._send(channel, [message], deadline, self._patience)
            if sent.broken is None and sent.verdicts:
                channel.channel.close()
        except BROKER_FAILURES as error:
            self._discard()
            return Sent(verdicts=sent.verdicts, broken=self._explained(error))
        return sent

    def news(self) -> Mapping[int, Verdict]:
        if any(channel.tracker.waiting for channel in self._channels):
            self._read_pending()
        self._collect()
        since = min((channel.tracker.awaited_since for channel in self._channels), default=inf)
        if monotonic() > max(since, self._unblocked_at) + _LATEST_SECONDS:
            logger.warning("The broker has not confirmed a message for %.0f s; the connection is given up.", _LATEST_SECONDS)
            self._discard()
        news, self._news = self._news, {}
        return news

    @property
    def _main(self) -> _Channel:
        """The channel of all messages but probes. The others are those of probes without an answer."""
        return self._channels[0]

    @property
    def _patience(self) -> float:
        """Seconds without an answer after which a pass ends early."""
        # An answer that came a minute late counts as a round trip, too.
        patience = max(_SHORTEST_PATIENCE_SECONDS, _PATIENCE_ROUND_TRIPS * (self.round_trip or 0.0))
        return min(patience, _LONGEST_PATIENCE_SECONDS)

    def _opened(self) -> _Channel:
        return _Channel(self._amqp, self._on_return)

    def _send(self, channel: _Channel, messages: Sequence[OutgoingMessage], deadline: float, patience: float) -> Sent:
        refused: dict[int, Verdict] = {}
        positions = {message.position for message in messages}
        for other in self._channels:
            if other.tracker.waiting:
                other.tracker.forget(positions)
        broken: str | None = None
        suspected: list[int] = []
        suspicious = False
        tracker = channel.tracker
        self._current, behind, channel.sent_at = channel, tracker.last_tag, monotonic()
        try:
            self._is_overdue = not (
                self._publish(channel, messages, deadline, patience, refused)
                and self._await_confirms(channel, deadline, patience, behind)
            )
        except BROKER_FAILURES as error:
            broken = self._explained(error)
            # An earlier message may be the cause.
            suspicious = _code_of(error) in _FAULTS and not positions.issuperset(tracker.unanswered)
            suspected = [] if suspicious else self._suspected(channel, error, messages)
            if len(suspected) == 1 and (_blames_a_destination(error) or len(tracker.unanswered) == 1):
                refused[suspected[0]] = Verdict(_FAULTS[_code_of(error)], f"the broker refuses it: {broken}")
        verdicts = self._collect(positions) | refused
        if broken is None or self._blocked:
            tracker.left(monotonic())
            awaited = positions.intersection(tracker.unanswered)
            # The broker enqueues the contents of the socket's buffers when an alarm ends, even if this side disconnects. So
            # keep this connection until then: every new connection would add another batch of duplicates.
            return Sent(verdicts=verdicts, awaited=awaited, broken=self._blocked, suspicious=self._blocked is not None)
        tracker.forget(positions)
        self._discard()
        return Sent(verdicts=verdicts, broken=broken, suspected=suspected, suspicious=suspicious)

    def idle(self) -> None:
        """Read pending frames and send a heartbeat; this finds a dead connection or channel before the next batch."""
        self._read_pending()
        if self._connection is not None and self._is_overdue and not self._blocked:
            try:
                self._require_alive()
            except BrokerUnavailable as error:
                logger.info(_LOST_WHILE_IDLE, error)

    def _read_pending(self) -> None:
        if self._connection is None:
            return
        try:
            self._read(0.001)
        except BROKER_FAILURES as error:
            logger.info(_LOST_WHILE_IDLE, describe(error))
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
        self._exchanges = {""}
        events = {"on_blocked": self._on_blocked, "on_unblocked": self._on_unblocked}
        try:
            self._connection = BrokerConnection(self._url, tls=self._tls, **connection_options(self._url, **events))
            self._connection.ensure_connection(**connection_attempts(self._url))
            # Stored here, because kombu's own `connection` attribute silently reconnects after this connection is closed.
            self._amqp = self._connection.connection
            asked_at = monotonic()
            self._channels = [self._opened()]
            self._current = self._main
            self.round_trip = (monotonic() - asked_at) / _ROUND_TRIPS_TO_OPEN
            self._main.channel.exchange_declare(self._exchange, EXCHANGE_TYPE, durable=True, auto_delete=False)
        except Exception as error:
            # Any exception: the server on that port may not speak AMQP.
            self._discard()
            raise (BrokerRefused if is_refusal(error) else BrokerUnavailable)(self._explained(error)) from error
        read_in_chunks(self._amqp.transport)

    def _discard(self) -> None:
        connection = self._connection
        for channel in self._channels:
            self._lose(channel)
        self._channels = []
        self._connection = self._amqp = self._blocked = None
        self._is_overdue = False
        if connection is not None:
            try:
                connection.collect(socket_timeout=1.0)
            except BROKER_FAILURES as error:
                logger.debug("Discarding a broker connection: %s", describe(error))

    def _require_alive(self) -> None:
        """Make sure that the broker is late and not unreachable, which the socket alone does not show for a long time.

        It opens a channel, and then answers on the main one, too, or that is replaced: RabbitMQ answers nothing on a channel
        whose process waits for a queue, not even for messages to other queues.
        """
        main = self._main
        try:
            with self._amqp.transport.having_timeout(_ALIVE_SECONDS):
                self._amqp.channel().close()
            if main.tracker.waiting and not self._answers(main):
                with self._amqp.transport.having_timeout(_ALIVE_SECONDS):
                    opened = self._opened()
                self._lose(main)
                self._channels[0] = opened
        except BROKER_FAILURES as error:
            if self._blocked:  # by an alarm that came meanwhile; this connection is kept, see `_send`
                raise BrokerUnavailable(self._blocked) from error
            self._discard()
            raise BrokerUnavailable(f"{_OVERDUE}, and does not answer: {describe(error)}") from error
        self._is_overdue = False

    def _answers(self, channel: _Channel) -> bool:
        with suppress(TimeoutError), self._amqp.transport.having_timeout(self._patience):
            channel.channel.confirm_select()  # it has been, so this changes nothing
            return True
        return False

    def _collect(self, positions: Collection[int] = ()) -> dict[int, Verdict]:
        """The new answers to these messages; all others are news. Channels of probes that are answered are forgotten."""
        verdicts: dict[int, Verdict] = {}
        for channel in self._channels:
            self._notice(channel)
            for position, verdict in channel.tracker.collect().items():
                (verdicts if position in positions else self._news)[position] = verdict
        self._channels[1:] = [channel for channel in self._channels[1:] if channel.tracker.waiting]
        return verdicts

    def _notice(self, channel: _Channel) -> bool:
        """Has an answer come on this channel since the last call?"""
        was_silent = channel.is_silent
        if not channel.has_news():
            return False
        if was_silent:
            self.round_trip = channel.heard_at - channel.sent_at
        return True

    def _lose(self, channel: _Channel) -> None:
        """No answer comes from this channel any more."""
        self._news.update(channel.tracker.collect())
        self._news.update(dict.fromkeys(channel.tracker.unanswered, _LOST))

    def _publish(
        self,
        channel: _Channel,
        messages: Sequence[OutgoingMessage],
        deadline: float,
        patience: float,
        refused: dict[int, Verdict],
    ) -> bool:
        """Write the messages; False if the deadline has passed, or the broker falls silent, before all were written."""
        buffer = bytearray()
        unwritten: list[OutgoingMessage] = []
        behind = channel.tracker.last_tag
        unconfirmed_bytes = 0
        missing: set[str] = set()
        for message in messages:
            frames = self._encode(channel, message, missing)
            if isinstance(frames, Verdict):
                refused[message.position] = frames
                continue
            unwritten.append(message)
            buffer += frames
            if len(buffer) < _WRITE_BYTES:
                continue
            unconfirmed_bytes += len(buffer)
            if not self._write(channel, buffer, unwritten, deadline):
                return False
            while self._read(_GLANCE_SECONDS):
                pass
            if unconfirmed_bytes > _WINDOW_BYTES:
                # If the acks are not read, the broker stops writing them, and then stops reading.
                if not self._await_confirms(channel, deadline, patience, behind):
                    return False
                unconfirmed_bytes = 0
        return self._write(channel, buffer, unwritten, deadline)

    def _encode(self, channel: _Channel, message: OutgoingMessage, missing: set[str]) -> bytes | Verdict:
        # Outside of the `try`: it asks the broker, and the connection may be lost.
        exchange, routing_key = message.exchange or self._exchange, message.envelope.topic
        if message.queue and self._exists(message.queue, missing):
            exchange = message.queue  # its partitions are behind it
        elif message.queue:
            exchange, routing_key = "", message.queue
        elif message.exchange and message.wire is None and not self._exists(exchange, missing):
            return _no_exchange(exchange)
        try:
            if message.wire is None:
                return channel.frames.publish(message, exchange, routing_key)
            wire = Wire.from_text(message.wire)
            frames = channel.frames.publish_formed(message.envelope, wire)
        except Exception as error:  # noqa: BLE001 - a row written by another program may hold anything
            return Verdict(PublishOutcome.REFUSED, f"it cannot be encoded: {describe(error)}")
        if not self._exists(wire.exchange, missing):
            return _no_exchange(wire.exchange)
        return frames

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

    def _write(self, channel: _Channel, buffer: bytearray, unwritten: list[OutgoingMessage], deadline: float) -> bool:
        left = deadline - monotonic()
        if left <= 0 or self._blocked:
            return False
        # Only now, because the broker counts what it receives.
        for message in unwritten:
            channel.tracker.sent(message.position, message.envelope.id)
        unwritten.clear()
        with self._amqp.transport.having_timeout(left):
            self._amqp.transport.write(buffer)
        self._amqp.bytes_sent += 1
        buffer.clear()
        return True

    def _await_confirms(self, channel: _Channel, deadline: float, patience: float, behind: int) -> bool:
        """Wait for the confirms of the publishes behind a tag; False at the deadline, or without news for too long."""
        since = monotonic()
        while channel.tracker.waits_behind(behind):
            left = min(deadline, since + patience) - monotonic()
            if left <= 0 or self._blocked:
                return False
            self._read(min(left, _TICK_SECONDS))
            if self._notice(channel):
                since = channel.heard_at
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
        current = self._current
        kind, channel, payload = frame
        if kind == METHOD and channel == current.channel.channel_id and payload.startswith(_BASIC_ACK):
            self._amqp.bytes_recv += 1  # py-amqp's heartbeat check reads this counter
            current.tracker.acked(*_ACK_ARGUMENTS.unpack_from(payload, len(_BASIC_ACK)))
        else:
            self._amqp.on_inbound_frame(frame)
        return current.tracker.waiting

    def _on_return(self, tracker: ConfirmTracker, error: Exception, exchange: str, routing_key: str, message: Any) -> None:
        bound = f"no queue is bound to exchange {exchange!r} for topic {routing_key!r}"
        reason = f"unroutable: {bound if exchange else f'queue {routing_key!r} does not exist'}"
        tracker.returned(str(message.properties.get("message_id", "")), reason)

    def _on_blocked(self, reason: str) -> None:
        self._blocked = "it blocks publishers, probably because of a memory or disk alarm; see the broker's log"

    def _on_unblocked(self) -> None:
        self._blocked, self._unblocked_at = None, monotonic()

    def _suspected(self, channel: _Channel, error: Exception, messages: Sequence[OutgoingMessage]) -> list[int]:
        """The positions of the messages that may have made the broker close the channel; empty for any other reason.

        RabbitMQ names the forbidden topic. It reads in order, so it stopped at the first message of that topic.
        """
        code = _code_of(error)
        if code not in _FAULTS or self._is_about_our_exchange(error):
            return []
        unanswered = set(channel.tracker.unanswered)
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
