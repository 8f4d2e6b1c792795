"""A fake broker that sends exactly the answers that a test scripts.

`FakeAmqpPeer` speaks the server side of AMQP 0-9-1 on a loopback port, as far as a publisher with confirms can see
it. It records every message it receives and sends the scripted answers, also such as no correct broker sends:
acks that are late, doubled, out of order or for tags that were never used.

    with FakeAmqpPeer() as peer:
        peer.script = lambda published: [partial(peer.nack, published)]
        publisher = connect_to(peer.url)

Without a script each message is acked at once; `hold()` stops that, and the test then answers by hand. Whatever the
client does against the protocol is recorded in `errors` and fails the `with` block.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from tests.support.fakes import amqp_wire as wire

CONNECTION = 0  # the channel that carries the connection's own methods
CAPABILITIES = ("publisher_confirms", "basic.nack", "connection.blocked", "consumer_cancel_notify")

# Methods we agree to, whatever they say: the types of their arguments up to the bits, the bit that means "no answer",
# the answer.
AGREED = {
    wire.EXCHANGE_DECLARE: ("Hss", 16, wire.EXCHANGE_DECLARE_OK),
    wire.QUEUE_DECLARE: ("Hs", 16, wire.QUEUE_DECLARE_OK),
    wire.QUEUE_BIND: ("Hsss", 1, wire.QUEUE_BIND_OK),
    wire.QOS: ("IH", 0, wire.QOS_OK),
    wire.CONFIRM_SELECT: ("", 1, wire.CONFIRM_SELECT_OK),
}


class ProtocolError(Exception):
    """The client sent something a broker would not accept."""


@dataclass(frozen=True)
class Published:
    """A message as it arrived. The tag counts from 1 on each opened channel; it is 0 outside confirm mode."""

    tag: int
    exchange: str
    routing_key: str
    mandatory: bool
    properties: dict[str, Any]
    headers: dict[str, Any]
    body: bytes
    connection: int = 1
    channel: int = 1
    content_header: bytes = field(default=b"", repr=False)


Action = Callable[[], object]
Script = Callable[[Published], Iterable[Action]]


class FakeAmqpPeer:
    """One port, any number of successive or parallel connections, numbered from 1.

    The answering methods take a tag, which means the publishing channel of the newest open connection, or a
    `Published`, which means the connection and channel it came by. They return whether there was still a socket to
    write to.
    """

    def __init__(self, *, heartbeat: int = 0, heartbeat_every: float | None = None, frame_max: int = 131072) -> None:
        self.heartbeat_offered, self.frame_max = heartbeat, frame_max
        self.published: list[Published] = []
        self.discarded: list[Published] = []  # arrived after we had closed their channel or connection
        self.methods: list[wire.Method] = []  # all methods received
        self.errors: list[Exception] = []
        self.connections = 0  # accepted so far
        self.heartbeats = 0  # received so far
        self.script: Script | None = None
        self.ack_all_automatically = True
        self.refuse_connections = False  # reset them as soon as they are made
        self.stuck = -1  # a channel that answers nothing
        self.mute = False  # go on reading, but answer no method, not even channel.open
        self._changed = threading.Condition()
        self._reading = True
        self._sessions: list[_Session] = []
        self._stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}//"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        if heartbeat_every is not None:
            self._threads.append(threading.Thread(target=self._beat, args=(heartbeat_every,), daemon=True))

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()
        for thread in self._threads:
            thread.join(5)
        for session in self._sessions:
            session.drop()
        if self.errors and exc is None:
            raise AssertionError(f"protocol errors: {self.errors}")

    # What the client did

    def wait_for(self, predicate: Callable[[], bool], timeout: float = 60) -> None:
        """Wait until the predicate holds. It is asked again whenever something arrives or a connection ends."""
        with self._changed:
            if not self._changed.wait_for(predicate, timeout):
                raise AssertionError(
                    f"waited {timeout} s in vain: {len(self.published)} published, {self.connections} connections, "
                    f"errors {self.errors}, last methods {self.methods[-5:]}"
                )

    def wait_for_published(self, count: int, timeout: float = 60) -> list[Published]:
        self.wait_for(lambda: len(self.published) >= count, timeout)
        return list(self.published)

    @property
    def open_connections(self) -> int:
        return sum(session.alive for session in list(self._sessions))

    # What the broker says

    def hold(self) -> None:
        """From now on answer a message only when the test calls a method for it."""
        self.script, self.ack_all_automatically = None, False

    def ack(self, tag: int | Published, multiple: bool = False) -> bool:
        return self._confirm(wire.ACK, tag, multiple)

    def nack(self, tag: int | Published, multiple: bool = False) -> bool:
        return self._confirm(wire.NACK, tag, multiple)

    def return_message(self, tag: int | Published, code: int = 312, text: str = "NO_ROUTE") -> bool:
        """Send the message back with its own properties and body. A broker does so before it acks."""
        session, message = self._find(tag)
        names = wire.shortstr(text) + wire.shortstr(message.exchange) + wire.shortstr(message.routing_key)
        data = wire.method_frame(message.channel, wire.RETURN, struct.pack(">H", code) + names)
        data += wire.frame(wire.HEADER_FRAME, message.channel, message.content_header)
        step = self.frame_max - wire.FRAME_OVERHEAD
        for at in range(0, len(message.body), step):
            data += wire.frame(wire.BODY_FRAME, message.channel, message.body[at : at + step])
        return session.send(data)

    def close_channel(self, code: int = 404, text: str = "NOT_FOUND") -> bool:
        """Close the publishing channel. As with a real broker, what is still on its way there is discarded."""
        session = self._newest()
        return session.close(session.publishing_channel, wire.CHANNEL_CLOSE, code, text)

    def close_connection(self, code: int = 320, text: str = "CONNECTION_FORCED") -> bool:
        return self._newest().close(CONNECTION, wire.CLOSE, code, text)

    def drop(self) -> None:
        """Reset the newest connection without closing it."""
        self._newest().drop()

    def blocked(self, reason: str = "low on memory") -> bool:
        return self._newest().send(wire.method_frame(CONNECTION, wire.BLOCKED, wire.shortstr(reason)))

    def unblocked(self) -> bool:
        return self._newest().send(wire.method_frame(CONNECTION, wire.UNBLOCKED))

    def heartbeat(self) -> bool:
        return self._newest().send(wire.frame(wire.HEARTBEAT_FRAME, CONNECTION))

    def pause_reading(self) -> None:
        """Read nothing more, as under an alarm. The client's writes succeed until the buffers are full."""
        self._reading = False

    def resume_reading(self) -> None:
        with self._changed:
            self._reading = True
            self._changed.notify_all()

    # Inside

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if self.refuse_connections:
                _reset(sock)
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._changed:
                self.connections += 1
                self._sessions.append(_Session(self, self.connections, sock))
                self._sessions[-1].thread.start()
                self._changed.notify_all()

    def _beat(self, interval: float) -> None:
        while not self._stopped.wait(interval):
            for session in list(self._sessions):
                if session.is_open:
                    session.send(wire.frame(wire.HEARTBEAT_FRAME, CONNECTION))

    def _newest(self) -> "_Session":
        with self._changed:
            return max(self._sessions, key=lambda session: (session.alive, session.number))

    def _find(self, tag: int | Published) -> tuple["_Session", Published]:
        if isinstance(tag, Published):
            return self._sessions[tag.connection - 1], tag
        session = self._newest()
        matching = [m for m in list(self.published) if (m.connection, m.tag) == (session.number, tag)]
        return session, matching[-1]

    def _confirm(self, method: wire.Method, tag: int | Published, multiple: bool) -> bool:
        if isinstance(tag, Published):
            session, channel, number = self._sessions[tag.connection - 1], tag.channel, tag.tag
        else:
            session, number = self._newest(), tag
            channel = session.publishing_channel
        return session.send(wire.method_frame(channel, method, struct.pack(">QB", number, multiple)))

    def _received(self, message: Published) -> None:
        if self.script is not None:
            for action in self.script(message):
                action()
        elif self.ack_all_automatically and message.tag:
            self.ack(message)


@dataclass
class _Content:
    """An incomplete message: basic.publish has arrived, header or body frames are still missing."""

    exchange: str
    routing_key: str
    mandatory: bool
    header: bytes = b""
    body: bytearray = field(default_factory=bytearray)
    missing: int = 0


class _Session:
    """One connection: its own thread reads, any thread may write."""

    def __init__(self, peer: FakeAmqpPeer, number: int, sock: socket.socket) -> None:
        self.peer, self.number, self.sock = peer, number, sock
        self.alive = True
        self.is_open = False  # the handshake is complete
        self.publishing_channel = 0  # the last in confirm mode, before that the first opened
        self.thread = threading.Thread(target=self._run, daemon=True)
        self._writing = threading.Lock()
        self._buffer = bytearray()
        self._last_tag: dict[int, int | None] = {}  # by open channel; None outside confirm mode
        self._contents: dict[int, _Content] = {}  # by channel
        self._closing: set[int] = set()  # channels we closed, until the client says close-ok

    def send(self, data: bytes) -> bool:
        try:
            with self._writing:
                self.sock.sendall(data)
        except OSError:
            return False
        return True

    def close(self, channel: int, method: wire.Method, code: int, text: str) -> bool:
        self._closing.add(channel)
        args = struct.pack(">H", code) + wire.shortstr(text) + struct.pack(">HH", *wire.PUBLISH)
        return self.send(wire.method_frame(channel, method, args))

    def drop(self) -> None:
        self._end()
        if self.thread is not threading.current_thread():
            self.thread.join(5)  # the reset goes out only when the read under way has ended

    def _end(self) -> None:
        _reset(self.sock)
        with self.peer._changed:
            self.alive = self.is_open = False
            self.peer._changed.notify_all()

    def _run(self) -> None:
        try:
            if self._read(8) != wire.HEADER:
                raise ProtocolError("not an AMQP 0-9-1 header")  # noqa: TRY301 - for the test to hear of, below
            properties = wire.longstr(wire.shortstr("capabilities") + b"F" + wire.flags_table(CAPABILITIES))
            mechanisms, locales = wire.longstr(b"PLAIN AMQPLAIN"), wire.longstr(b"en_US")
            self._reply(CONNECTION, wire.START, b"\x00\x09" + properties + mechanisms + locales)
            while self._handle(*self._read_frame()):
                pass
            self.sock.shutdown(socket.SHUT_WR)  # what we said last must arrive before the reset
            self._read(1)
        except (OSError, EOFError):
            pass  # the client has disconnected, or we dropped it
        except Exception as error:  # noqa: BLE001 - a broken rule, or a script that raised: the test must hear of both
            self.peer.errors.append(error)
        finally:
            self._end()

    def _read(self, size: int) -> bytes:
        while len(self._buffer) < size:
            chunk = self.sock.recv(65536)
            if not chunk:
                raise EOFError
            self._buffer += chunk
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _read_frame(self) -> tuple[int, int, bytes]:
        with self.peer._changed:
            self.peer._changed.wait_for(lambda: self.peer._reading or not self.alive)
        kind, channel, size = struct.unpack(">BHI", self._read(7))
        if size > self.peer.frame_max - wire.FRAME_OVERHEAD:
            raise ProtocolError(f"frame of {size} bytes where {self.peer.frame_max} were agreed")
        payload = self._read(size)
        if self._read(1) != b"\xce":
            raise ProtocolError("torn frame")
        return kind, channel, payload

    def _handle(self, kind: int, channel: int, payload: bytes) -> bool:
        """Read one frame; false if it was the last."""
        if kind == wire.METHOD_FRAME:
            args = wire.Reader(payload)
            class_id, method_id = args.values("HH")
            return self._handle_method(channel, (class_id, method_id), args)
        if kind == wire.HEARTBEAT_FRAME:
            with self.peer._changed:
                self.peer.heartbeats += 1
                self.peer._changed.notify_all()
            return True
        content = self._contents[channel]
        if kind == wire.HEADER_FRAME:
            content.header = payload
            (content.missing,) = struct.unpack_from(">Q", payload, 4)
        else:
            content.body += payload
            content.missing -= len(payload)
        if content.missing == 0:
            self._handle_message(channel, self._contents.pop(channel))
        return True

    def _handle_method(self, channel: int, method: wire.Method, args: wire.Reader) -> bool:  # noqa: C901 - a table of methods
        with self.peer._changed:
            self.peer.methods.append(method)
            self.peer._changed.notify_all()
        if channel != CONNECTION and channel not in self._last_tag and method != wire.CHANNEL_OPEN:
            raise ProtocolError(f"method {method} on channel {channel}, which is not open")
        if method in AGREED:
            self._agree(channel, method, args)
        elif method == wire.START_OK:
            offer = struct.pack(">HIH", 2047, self.peer.frame_max, self.peer.heartbeat_offered)
            self._reply(channel, wire.TUNE, offer)
        elif method == wire.OPEN:
            self._reply(channel, wire.OPEN_OK, wire.shortstr(""))
            self.is_open = True
        elif method == wire.CLOSE:
            self._reply(channel, wire.CLOSE_OK)
        elif method == wire.CHANNEL_OPEN:
            self._last_tag[channel] = None
            self.publishing_channel = self.publishing_channel or channel
            self._reply(channel, wire.CHANNEL_OPEN_OK, wire.longstr(b""))
        elif method in (wire.CHANNEL_CLOSE, wire.CHANNEL_CLOSE_OK):
            del self._last_tag[channel]
            self._closing.discard(channel)
            if method == wire.CHANNEL_CLOSE:
                self._reply(channel, wire.CHANNEL_CLOSE_OK)
        elif method == wire.PUBLISH:
            _, exchange, routing_key, bits = args.values("HssB")
            self._contents[channel] = _Content(exchange, routing_key, mandatory=bool(bits & 1))
        elif method not in (wire.TUNE_OK, wire.CLOSE_OK):
            raise ProtocolError(f"method {method} is not part of this fake")
        return self.peer.mute or method not in (wire.CLOSE, wire.CLOSE_OK)

    def _agree(self, channel: int, method: wire.Method, args: wire.Reader) -> None:
        kinds, no_answer, answer = AGREED[method]
        *names, bits = args.values(kinds + "B")
        if method == wire.CONFIRM_SELECT:
            self._last_tag[channel] = self._last_tag[channel] or 0
            self.publishing_channel = channel
        if not bits & no_answer:
            counts = wire.shortstr(names[-1]) + bytes(8) if method == wire.QUEUE_DECLARE else b""
            self._reply(channel, answer, counts)

    def _handle_message(self, channel: int, content: _Content) -> None:
        properties = wire.Reader(content.header, at=12).properties()
        headers = properties.pop("headers", {})
        discard = not self._closing.isdisjoint({CONNECTION, channel})
        last_tag = self._last_tag[channel]
        tag = 0 if discard or last_tag is None else last_tag + 1
        if tag:
            self._last_tag[channel] = tag
        message = Published(
            tag, content.exchange, content.routing_key, content.mandatory, properties, headers, bytes(content.body),
            connection=self.number, channel=channel, content_header=content.header,
        )  # fmt: skip
        with self.peer._changed:
            (self.peer.discarded if discard else self.peer.published).append(message)
            self.peer._changed.notify_all()
        if not discard:
            self.peer._received(message)

    def _reply(self, channel: int, method: wire.Method, args: bytes = b"") -> None:
        if not self.peer.mute and channel != self.peer.stuck:
            self.send(wire.method_frame(channel, method, args))


def _reset(sock: socket.socket) -> None:
    """Close with RST instead of FIN; the shutdown wakes a thread that is reading."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.shutdown(socket.SHUT_RD)
    sock.close()
