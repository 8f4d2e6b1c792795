"""An encrypted port in front of a server that has none."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator

from tests.support.servers.private import LOOPBACK

CHUNK = 65536


@contextlib.contextmanager
def encrypted(port: int, context: ssl.SSLContext) -> Iterator[int]:
    """A port whose clients are connected to `port`, if the handshake succeeds."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with (
                contextlib.suppress(OSError),
                context.wrap_socket(self.request, server_side=True) as client,
                socket.create_connection((LOOPBACK, port)) as server,
            ):
                back = threading.Thread(target=_forward, args=(server, client), daemon=True)
                back.start()
                _forward(client, server)
                back.join()

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server((LOOPBACK, 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield listening.server_address[1]
        listening.shutdown()


def _forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(CHUNK):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
