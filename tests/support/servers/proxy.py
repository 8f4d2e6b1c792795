"""A TCP proxy that breaks connections on request.

    with FaultProxy("127.0.0.1", rabbit.port) as proxy:
        broker_url = proxy.through(rabbit.url)
        ...
        proxy.freeze()      # like an unplugged cable: nothing arrives, and no error is reported

One thread runs the event loop of all sockets. It carries a request out before the call returns, so the fault affects
everything that the test does next.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Literal, Self
from urllib.parse import urlsplit, urlunsplit

from tests.support.servers.private import LOOPBACK, free_port

CHUNK = 65536
MOST_IN_FLIGHT = 16
"""Chunks in one direction of a connection."""
ORDER_SECONDS = 60.0
CONNECT_SECONDS = 5.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close() sends RST instead of FIN

Direction = Literal["to_server", "to_client"]
InFlight = asyncio.Queue[tuple[float, bytes]]
"""Each chunk with the time from when on it is written; the last one is empty."""


class _Link:
    """A client, and the server's side of it once connected."""

    def __init__(self, client: asyncio.StreamWriter) -> None:
        self.ends = [client]

    def close(self, *, resets: bool) -> None:
        for end in self.ends:
            if resets and not end.transport.is_closing():
                end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            end.transport.abort()


class FaultProxy:
    def __init__(self, target_host: str, target_port: int) -> None:
        self.target = (target_host, target_port)
        self.port = free_port()
        self.bytes_to_server = 0
        self.bytes_to_client = 0
        self._links: list[_Link] = []
        self._flows = asyncio.Event()
        self._flows.set()
        self._delay_seconds = 0.0
        self._drops_server_to_client = False
        self._cut_after: dict[Direction, int] = {}
        self._freeze_at = math.inf
        self._listener: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"fault-proxy-{self.port}", daemon=True)
        self._thread.start()
        self.accept()

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
        """Reset every connection. New ones are accepted, and get answers."""

        def end() -> None:
            self._close_all()
            self._drops_server_to_client = False

        self._order(end)

    def refuse(self) -> None:
        """Refuse new connections; those there are stay."""
        self._order(self._stop_listening)

    def accept(self) -> None:
        """Take new connections again."""
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(ORDER_SECONDS)

    def freeze(self) -> None:
        """Half-open: connections are accepted and stay open, nothing is forwarded, and neither side sees the other close."""
        self._order(self._flows.clear)

    def freeze_after(self, nbytes: int) -> None:
        """Freeze when this many more bytes have arrived at clients, before any other is forwarded."""
        self._order(lambda: setattr(self, "_freeze_at", self.bytes_to_client + nbytes))

    def thaw(self) -> None:
        """Forward again, beginning with what was sent meanwhile."""
        self._order(self._flows.set)

    def delay(self, seconds: float) -> None:
        """Let everything read from now on arrive that much later, in both directions. 0 ends it."""
        self._order(lambda: setattr(self, "_delay_seconds", seconds))

    def drop_server_to_client(self) -> None:
        """Discard the answers of the server, until `cut`: the client has lost bytes of the stream."""
        self._order(lambda: setattr(self, "_drops_server_to_client", True))

    def cut_after(self, nbytes: int, direction: Direction = "to_server") -> None:
        """Forward this many more bytes in one direction, over all connections, and then `cut`, once."""
        self._order(lambda: self._cut_after.update({direction: nbytes}))

    def stop(self) -> None:
        """Close everything, without a reset. The port is free afterwards."""
        if self._thread.is_alive():
            self._order(self._stop_listening)
            self._order(lambda: self._close_all(resets=False))
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(ORDER_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _order(self, action: Callable[[], None]) -> None:
        async def act() -> None:
            action()
            await asyncio.sleep(0)  # sockets are closed in the next turn of the loop

        asyncio.run_coroutine_threadsafe(act(), self._loop).result(ORDER_SECONDS)

    # Everything below runs in the proxy's own thread.

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(self._serve, LOOPBACK, self.port, limit=CHUNK, backlog=128)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _serve(self, from_client: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        link, is_broken = _Link(client), True
        self._links.append(link)
        try:
            await self._flows.wait()
            from_server, server = await asyncio.wait_for(asyncio.open_connection(*self.target, limit=CHUNK), CONNECT_SECONDS)
            link.ends.append(server)
            if link in self._links:  # it may have been cut meanwhile
                await self._forward(link, from_client, from_server)
                is_broken = False
        except OSError:
            pass
        finally:
            self._close(link, resets=is_broken)

    async def _forward(self, link: _Link, from_client: asyncio.StreamReader, from_server: asyncio.StreamReader) -> None:
        """Until one direction has ended."""
        client, server = link.ends
        to_server, to_client = InFlight(MOST_IN_FLIGHT), InFlight(MOST_IN_FLIGHT)
        tasks = [
            asyncio.ensure_future(self._read("to_server", from_client, to_server)),
            asyncio.ensure_future(self._read("to_client", from_server, to_client)),
            asyncio.ensure_future(self._write("to_server", to_server, server)),
            asyncio.ensure_future(self._write("to_client", to_client, client)),
        ]
        try:
            for ended in asyncio.as_completed(tasks):
                if await ended == "written":
                    return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, direction: Direction, source: asyncio.StreamReader, in_flight: InFlight) -> str:
        chunk = b" "
        while chunk:
            await self._flows.wait()
            chunk = await source.read(CHUNK)
            if not (chunk and self._drops_server_to_client and direction == "to_client"):
                await in_flight.put((time.monotonic() + self._delay_seconds, chunk))
        return "read"

    async def _write(self, direction: Direction, in_flight: InFlight, target: asyncio.StreamWriter) -> str:
        target.transport.set_write_buffer_limits(high=0)
        while chunk := (await self._next(in_flight)):
            allowed = self._cut_after.get(direction)
            sent = chunk if allowed is None else chunk[:allowed]
            if allowed is not None:  # before another connection is looked at
                self._cut_after[direction] = allowed - len(sent)
            target.write(sent)
            await target.drain()
            setattr(self, f"bytes_{direction}", getattr(self, f"bytes_{direction}") + len(sent))
            if self.bytes_to_client >= self._freeze_at:
                self._freeze_at = math.inf
                self._flows.clear()
            if self._cut_after.get(direction) == 0:
                del self._cut_after[direction]
                self._close_all()
                break
        return "written"

    async def _next(self, in_flight: InFlight) -> bytes:
        due_at, chunk = await in_flight.get()
        await asyncio.sleep(max(0.0, due_at - time.monotonic()))
        await self._flows.wait()
        return chunk

    def _close_all(self, *, resets: bool = True) -> None:
        for link in list(self._links):
            self._close(link, resets=resets)

    def _close(self, link: _Link, *, resets: bool = True) -> None:
        if link in self._links:
            self._links.remove(link)
        link.close(resets=resets)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
