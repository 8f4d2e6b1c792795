"""The HTTP server of a company that receives webhooks, on a loopback port. It answers as the test says, and keeps all."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.message import Message
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from tests.support.servers.private import LOOPBACK

CERTIFICATE = Path(__file__).parent / "hooks.example.pem"
"""Self-signed, for the host hooks.example, with its key."""


@dataclass(frozen=True)
class Request:
    path: str
    headers: Message
    body: bytes

    @cached_property
    def id(self) -> str:
        return str(self.headers["webhook-id"])

    @cached_property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Reply:
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    interim: Sequence[int] = ()


class Receiver(ThreadingHTTPServer):
    """For `with`. `answer` is called with each request, in a thread of its own, and may wait."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answer: Callable[[Request], Reply] = lambda request: Reply(), *, encrypted: bool = False) -> None:
        super().__init__((LOOPBACK, 0), _Handler)
        self.answer = answer
        self.requests: list[Request] = []
        if encrypted:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE)
            self.socket = context.wrap_socket(self.socket, server_side=True)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/hooks"

    @property
    def paths(self) -> list[str]:
        return [request.path for request in self.requests]

    @property
    def ids(self) -> list[str]:
        return [request.id for request in self.requests]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that ends the connection is what some tests are about."""

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = Request(self.path, self.headers, body)
        self.server.requests.append(request)
        reply = self.server.answer(request)
        for status in reply.interim:
            self.send_response_only(status)
            self.send_header("Link", "</style.css>; rel=preload")
            self.end_headers()
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body)

    do_GET = do_POST  # noqa: N815 - a redirect that is followed would arrive here

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the standard library
        """Nothing on the terminal."""
