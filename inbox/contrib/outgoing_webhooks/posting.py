"""One POST request to a checked address, with a limit for its whole duration.

`http.client` is used because it does nothing by itself: it follows no redirect, knows no proxy, and sends through the socket
that it is given. So the address that was checked is the one that is connected to, while the certificate is verified for the
host.

A timeout of a socket limits each read, so a server that sends a byte now and then would hold a thread for ever. A timer shuts
the socket down at the end of the time.
"""

import http.client
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from http import HTTPStatus
from urllib.parse import SplitResult, urlsplit

from exactly_once.process.clock import monotonic
from exactly_once.wire.text import describe
from inbox.contrib.outgoing_webhooks.addresses import Network, NotAllowed, allowed_addresses, port_of

SUCCESS = range(200, 300)
_INTERIM = range(100, 200)
_ANSWER_BYTES = 2_000
"""How much of an answer is read."""
_CONNECT_SECONDS = 5.0


class NoAnswer(Exception):
    """The request was not answered: the host cannot be reached, or its certificate is invalid, or it took too long."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of an endpoint.

    Attributes:
        headers: by their names in lower case.
        beginning: of its body, if it is not a success.
    """

    status: int
    headers: Mapping[str, str]
    beginning: bytes


def post(url: str, body: bytes, headers: Mapping[str, str], *, timeout: timedelta, private: Sequence[Network]) -> Answer:
    """Send a POST request and read the beginning of its answer.

    Args:
        timeout: the longest duration from the connection to the answer. Resolving the host takes as long as the resolver takes.
        private: see `addresses`.

    Raises:
        NoAnswer: the reason, for operators.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        found = allowed_addresses(host, port_of(parts), is_encrypted=parts.scheme == "https", private=private)
    except NotAllowed as error:
        raise NoAnswer(str(error)) from None
    except (OSError, UnicodeError) as error:
        raise NoAnswer(f"The host {host} cannot be resolved: {describe(error)}") from error
    limit = _Limit(timeout)
    try:
        with limit.enforced():
            return _exchanged(parts, found, body, headers, limit)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if limit.is_over:
            raise NoAnswer(f"The endpoint took longer than {timeout.total_seconds():g} s.") from error
        raise NoAnswer(f"No answer: {type(error).__name__}: {describe(error)}") from error


class _Limit:
    """The end of a request's time; the socket that is shut down then."""

    def __init__(self, timeout: timedelta) -> None:
        self._ends_at = monotonic() + timeout.total_seconds()
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._was_cut_off = False

    @property
    def seconds_left(self) -> float:
        return self._ends_at - monotonic()

    @property
    def is_over(self) -> bool:
        return self._was_cut_off or self.seconds_left <= 0

    def holds(self, used: socket.socket) -> None:
        """Raises TimeoutError if the time is over."""
        with self._lock:
            self._socket = used
        if self.is_over:
            raise TimeoutError

    @contextmanager
    def enforced(self) -> Iterator[None]:
        timer = threading.Timer(max(0.0, self.seconds_left), self._shut_down)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with self._lock:
                if self._socket is not None:
                    self._socket.close()
                    self._socket = None

    def _shut_down(self) -> None:
        with self._lock, suppress(OSError):
            self._was_cut_off = True
            if self._socket is not None:
                # Of the class socket, because that of an SSLSocket would let the reading thread go on unencrypted.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class _FinalResponse(http.client.HTTPResponse):
    """Reads on after interim responses (RFC 9110, 15.2). The standard library does so after 100 only."""

    def begin(self) -> None:
        super().begin()
        while self.status in _INTERIM and self.status != HTTPStatus.SWITCHING_PROTOCOLS:
            self.headers = None  # type: ignore[assignment]  # else nothing is read
            super().begin()


def _exchanged(parts: SplitResult, addresses: Sequence[str], body: bytes, headers: Mapping[str, str], limit: _Limit) -> Answer:
    host, port = parts.hostname or "", port_of(parts)
    plain = _connected(addresses, port, limit)
    limit.holds(plain)
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        encrypted = _tls().wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
        limit.holds(encrypted)
        encrypted.do_handshake()
        connection = http.client.HTTPSConnection(host, port, context=_tls())
        connection.sock = encrypted
    else:
        connection = http.client.HTTPConnection(host, port)
        connection.sock = plain
    connection.response_class = _FinalResponse
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection.request("POST", path, body, {**headers, "Connection": "close"})
    with connection.getresponse() as response:
        if limit.is_over:
            # To the client, headers that were cut off by the end of the connection look complete.
            raise TimeoutError
        received = {name.lower(): value for name, value in response.headers.items()}
        return Answer(status=response.status, headers=received, beginning=_beginning(response))


def _beginning(response: http.client.HTTPResponse) -> bytes:
    # Not of a success: nothing needs it, and waiting for it could only turn the success into a failure.
    if response.status in SUCCESS:
        return b""
    with suppress(OSError, http.client.HTTPException):
        return response.read(_ANSWER_BYTES)
    return b""


def _connected(addresses: Sequence[str], port: int, limit: _Limit) -> socket.socket:
    """A socket that is connected to the first address that answers."""
    failure: OSError | None = None
    for address in addresses:
        seconds = min(_CONNECT_SECONDS, limit.seconds_left)
        if seconds <= 0:
            break
        try:
            connected = socket.create_connection((address, port), seconds)
        except OSError as error:
            failure = error
        else:
            connected.settimeout(max(0.1, limit.seconds_left))
            return connected
    raise failure or TimeoutError()


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
