"""RabbitMQ's management API: what AMQP does not show, such as policies and the number of messages in each queue.

A request has a limit for all of it. It must not delay a thread that receives, or a page: read it in a thread of its own.
"""

import base64
import json
import socket
import threading
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlsplit

import kombu

from exactly_once.conf.app_options import DEFAULT_TLS, TlsOptions
from exactly_once.process.clock import monotonic
from exactly_once.transport.broker import scheme_of, speaks_amqp

_DEFAULTS = {"amqp": (5672, "http", 15672), "pyamqp": (5672, "http", 15672), "amqps": (5671, "https", 15671)}
"""By the broker's scheme: its default port, and the scheme and default port of the API."""
_TIMEOUT_SECONDS = 2.0
_LONGEST_SECONDS = 5.0
"""For a whole request: the timeout limits each read, and an API may send a byte now and then."""
_FRESH_SECONDS = 5.0
_KNOWN_SECONDS = 30.0
_WAIT_SECONDS = 0.5


class QueueDepths:
    """The number of messages in each queue of the broker's virtual host, for pages.

    Args:
        broker_url: of the broker; only an AMQP broker is asked.
        tls: how its certificate is verified.
        url: of the API; "" for its default port, if the broker uses its own default port.
    """

    def __init__(self, broker_url: str, url: str, tls: TlsOptions = DEFAULT_TLS) -> None:
        self._broker_url, self._url, self._tls = broker_url, url, tls
        self._lock = threading.Lock()
        self._reading: threading.Thread | None = None
        self._known: Mapping[str, int] | None = None
        self._read_at = float("-inf")

    def known(self) -> Mapping[str, int] | None:
        """By the name of the queue, at most half a minute old; None if the API does not answer.

        What is older than five seconds is read again in a thread, for which this waits half a second at most.
        """
        with self._lock:
            reads = self._reading is not None and self._reading.is_alive()
            if not reads and speaks_amqp(self._broker_url) and monotonic() > self._read_at + _FRESH_SECONDS:
                self._reading = threading.Thread(target=self._read, name="queue-depths", daemon=True)
                self._reading.start()
            reading = self._reading
        if reading is not None:
            reading.join(_WAIT_SECONDS)
        return self._known if monotonic() < self._read_at + _KNOWN_SECONDS else None

    def _read(self) -> None:
        broker = kombu.Connection(self._broker_url)
        url = self._url or default_url(self._broker_url, broker)
        try:
            queues = read_list(url, broker, "queues", "?columns=name,messages", tls=self._tls) if url else None
            self._known = None if queues is None else {queue["name"]: int(queue.get("messages", 0)) for queue in queues}
        except Exception:  # noqa: BLE001 - whatever an API answers, the page shows that the depths are unknown
            self._known = None
        self._read_at = monotonic()


def default_url(broker_url: str, broker: kombu.Connection) -> str:
    """The default URL of the API, if the broker uses its default port; else "", because the API's port is unknown."""
    port, scheme, api_port = _DEFAULTS[scheme_of(broker_url)]
    return f"{scheme}://{broker.hostname}:{api_port}" if (broker.port or port) == port else ""


def read_list(
    url: str, broker: kombu.Connection, kind: str, query: str = "", *, tls: TlsOptions = DEFAULT_TLS
) -> list[dict[str, Any]]:
    """The objects of this kind in the broker's virtual host. Raises any error."""
    at = urlsplit(url)
    user, password = (at.username, at.password) if at.username else (broker.userid or "guest", broker.password or "guest")
    credentials = base64.b64encode(f"{user}:{password}".encode()).decode()
    host, port = at.hostname or "", at.port
    if at.scheme == "https":
        connection: HTTPConnection = HTTPSConnection(host, port, timeout=_TIMEOUT_SECONDS, context=tls.context())
    else:
        connection = HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS)
    connection.connect()
    # Of the class socket, because that of an SSLSocket would let the reading thread go on unencrypted.
    end = threading.Timer(_LONGEST_SECONDS, partial(socket.socket.shutdown, connection.sock, socket.SHUT_RDWR))
    end.daemon = True
    end.start()
    try:
        path = f"{at.path.rstrip('/')}/api/{kind}/{quote(broker.virtual_host or '/', safe='')}{query}"
        connection.request("GET", path, headers={"Authorization": f"Basic {credentials}", "Connection": "close"})
        answer = connection.getresponse()
        if answer.status != HTTPStatus.OK:
            raise OSError(f"it answered {answer.status} {answer.reason}")
        found = json.load(answer)
    finally:
        end.cancel()
        connection.close()
    if not isinstance(found, list):
        raise TypeError("its answer is not a list")
    return found
