"""A TCP proxy that breaks connections on request.

    with FaultProxy("127.0.0.1", rabbit.port) as proxy:
        broker_url = proxy.through(rabbit.url)
        ...
        proxy.freeze()      # like an unplugged cable: nothing arrives, and no error is reported

One thread owns all sockets. That thread carries a request out before the call returns, so the
fault affects everything that the test does next.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

from tests.support.servers.private import LOOPBACK, free_port

CHUNK = 65536
MOST_IN_FLIGHT = 16 * CHUNK
ORDER_SECONDS = 60.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close() sends RST instead of FIN

Direction = Literal["to_server", "to_client"]


class _Stream:
    """One direction of one connection: bytes read from `source`, each chunk due at its time at `target`."""

    def __init__(self, direction: Direction, source: socket.socket, target: socket.socket) -> None:
        self.direction = direction
        self.source = source
        self.target = target
        self.in_flight: deque[tuple[float, bytes]] = deque()
        self.ended = False

    @property
    def wants_more(self) -> bool:
        return not self.ended and sum(len(chunk) for _, chunk in self.in_flight) < MOST_IN_FLIGHT

    @property
    def is_drained(self) -> bool:
        return self.ended and not self.in_flight


class _Link:
    """A client, the server's side of it once connected, and the two streams between them."""

    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.server: socket.socket | None = None
        self.streams: list[_Stream] = []

    def join(self, server: socket.socket) -> None:
        self.server = server
        self.streams = [_Stream("to_server", self.client, server), _Stream("to_client", server, self.client)]

    @property
    def sockets(self) -> list[socket.socket]:
        return [self.client] if self.server is None else [self.client, self.server]


class FaultProxy:
    def __init__(self, target_host: str, target_port: int) -> None:
        self.target = (target_host, target_port)
        self.port = free_port()
        self.bytes_to_server = 0
        self.bytes_to_client = 0
        self._links: list[_Link] = []
        self._frozen = False
        self._delay_seconds = 0.0
        self._drops_server_to_client = False
        self._cut_after: dict[Direction, int] = {}
        self._orders: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._bell, self._bell_end = socket.socketpair()
        self._bell_end.setblocking(False)
        self._listener: socket.socket | None = self._listen()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"fault-proxy-{self.port}", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """Clients connected now."""
        return len(self._links)

    def through(self, url: str) -> str:
        """The same URL by way of this proxy."""
        parts = urlsplit(url)
        credentials, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{credentials}{at}{LOOPBACK}:{self.port}"))

    def cut(self) -> None:
        """Reset every connection. New ones are accepted."""
        self._order(self._cut)

    def refuse(self) -> None:
        """Refuse new connections; those there are stay."""
        self._order(self._stop_listening)

    def accept(self) -> None:
        """Take new connections again."""
        self._order(self._start_listening)

    def freeze(self) -> None:
        """Half-open: connections are accepted and stay open, nothing is forwarded, and neither side sees the other close."""
        self._order(lambda: setattr(self, "_frozen", True))

    def thaw(self) -> None:
        """Forward again, beginning with what was sent meanwhile."""
        self._order(lambda: setattr(self, "_frozen", False))

    def delay(self, seconds: float) -> None:
        """Let everything read from now on arrive that much later, in both directions. 0 ends it."""
        self._order(lambda: setattr(self, "_delay_seconds", seconds))

    def drop_server_to_client(self, drop: bool) -> None:
        """Discard the answers of the server. End it with `cut`, because the client has lost bytes of the stream."""
        self._order(lambda: setattr(self, "_drops_server_to_client", drop))

    def cut_after(self, nbytes: int, direction: Direction = "to_server") -> None:
        """Forward this many more bytes in one direction, over all connections, and then `cut`, once."""
        self._order(lambda: self._cut_after.update({direction: nbytes}))

    def stop(self) -> None:
        """Close everything, without a reset. The port is free afterwards."""
        if self._thread.is_alive():
            self._order(lambda: setattr(self, "_stopping", True))
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _order(self, action: Callable[[], None]) -> None:
        done: Future[None] = Future()
        self._orders.append((action, done))
        self._bell.send(b"!")
        done.result(ORDER_SECONDS)

    # Everything below runs in the proxy's own thread.

    def _run(self) -> None:
        while not self._stopping:
            self._turn()
        self._stop_listening()
        for link in list(self._links):
            self._close(link)
        for end in (self._bell, self._bell_end):
            end.close()

    def _turn(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell_end, selectors.EVENT_READ, self._obey)
            if self._listener is not None:
                selector.register(self._listener, selectors.EVENT_READ, self._welcome)
            if not self._frozen:
                self._connect_newcomers()
                self._register_streams(selector)
            for key, events in selector.select(self._seconds_until_due()):
                self._call(key.data, events)

    def _call(self, data: Any, events: int) -> None:
        if isinstance(data, _Ready):
            data(self, events)
        else:
            data()

    def _register_streams(self, selector: selectors.BaseSelector) -> None:
        for link in self._links:
            for end in link.sockets:
                ready = _Ready(link, end)
                if events := ready.interest():
                    selector.register(end, events, ready)

    def _seconds_until_due(self) -> float | None:
        if self._frozen:
            return None
        heads = [s.in_flight[0][0] for link in self._links for s in link.streams if s.in_flight]
        return max(0.0, min(heads) - time.monotonic()) if heads else None

    def _obey(self) -> None:
        self._bell_end.recv(CHUNK)
        while self._orders:
            action, done = self._orders.popleft()
            try:
                action()
            except Exception as error:  # noqa: BLE001 - it is raised where the order was given
                done.set_exception(error)
            else:
                done.set_result(None)

    def _listen(self) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, self.port))
        listener.listen(128)
        listener.setblocking(False)
        return listener

    def _start_listening(self) -> None:
        if self._listener is None:
            self._listener = self._listen()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _welcome(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            self._tune(client)
            self._links.append(_Link(client))

    def _connect_newcomers(self) -> None:
        for link in list(self._links):
            if link.server is None:
                try:
                    server = socket.create_connection(self.target, timeout=5.0)
                except OSError:
                    self._reset(link)
                else:
                    self._tune(server)
                    link.join(server)

    @staticmethod
    def _tune(end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setblocking(False)

    def _read(self, link: _Link, stream: _Stream) -> None:
        try:
            chunk = stream.source.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self._reset(link)
            return
        if not chunk:
            stream.ended = True
        elif not (self._drops_server_to_client and stream.direction == "to_client"):
            stream.in_flight.append((time.monotonic() + self._delay_seconds, chunk))

    def _write(self, link: _Link, stream: _Stream) -> None:
        while stream.in_flight and stream.in_flight[0][0] <= time.monotonic():
            due_at, chunk = stream.in_flight.popleft()
            allowed = self._cut_after.get(stream.direction)
            try:
                sent = stream.target.send(chunk if allowed is None else chunk[:allowed])
            except BlockingIOError:
                sent = 0
            except OSError:
                self._reset(link)
                return
            self._count(stream.direction, sent)
            if allowed is not None and self._spend(stream.direction, sent) <= 0:
                self._cut()
                return
            if sent < len(chunk):
                stream.in_flight.appendleft((due_at, chunk[sent:]))
                return

    def _count(self, direction: Direction, sent: int) -> None:
        if direction == "to_server":
            self.bytes_to_server += sent
        else:
            self.bytes_to_client += sent

    def _spend(self, direction: Direction, sent: int) -> int:
        self._cut_after[direction] -= sent
        left = self._cut_after[direction]
        if left <= 0:
            del self._cut_after[direction]
        return left

    def _cut(self) -> None:
        for link in list(self._links):
            self._reset(link)

    def _reset(self, link: _Link) -> None:
        for end in link.sockets:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._close(link)

    def _close(self, link: _Link) -> None:
        if link in self._links:
            self._links.remove(link)
            for end in link.sockets:
                end.close()


class _Ready:
    """What one end of a link can do now: be read from, be written to."""

    def __init__(self, link: _Link, end: socket.socket) -> None:
        self.link = link
        self.end = end

    def interest(self) -> int:
        now = time.monotonic()
        reads = any(s.source is self.end and s.wants_more for s in self.link.streams)
        writes = any(s.target is self.end and s.in_flight and s.in_flight[0][0] <= now for s in self.link.streams)
        return (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if writes else 0)

    def __call__(self, proxy: FaultProxy, events: int) -> None:
        for stream in self.link.streams:
            if self.link not in proxy._links or proxy._frozen:
                return
            if stream.source is self.end and events & selectors.EVENT_READ:
                proxy._read(self.link, stream)
            if stream.target is self.end and events & selectors.EVENT_WRITE:
                proxy._write(self.link, stream)
            if stream.is_drained:
                proxy._close(self.link)
