"""The RabbitMQ policies of a queue. AMQP does not show them, so the management API is queried.

A delivery limit set by a policy applies in addition to the queue's own argument: RabbitMQ takes the lower one. The API is
queried at `INBOX["MANAGEMENT_URL"]`, or at its default port if the broker uses its default port. Without an answer, such limits
are not detected.

A thread of its own does this, with a limit for the whole request: the API must not delay the thread that receives.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import socket
import threading
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlsplit

import kombu

from exactly_once.broker import scheme_of, speaks_amqp
from exactly_once.masking import masked
from exactly_once.process.loop import StopRequest
from exactly_once.wire.text import describe
from inbox.conf import InboxOptions

logger = logging.getLogger(__name__)

_DEFAULTS = {"amqp": (5672, "http", 15672), "pyamqp": (5672, "http", 15672), "amqps": (5671, "https", 15671)}
"""By the broker's scheme: its default port, and the scheme and default port of the API."""
_TIMEOUT_SECONDS = 2.0
_LONGEST_SECONDS = 5.0
"""For a whole request: the timeout limits each read, and an API may send a byte now and then."""
_POLL_SECONDS = 30.0
_RETRY_SECONDS = 600.0
_APPLIES = {"all", "queues", "quorum_queues"}
_KINDS = ("policies", "operator-policies")


class Policies:
    """The policies as they were last read.

    Args:
        stop: ends the thread that reads them.
    """

    def __init__(self, options: InboxOptions, stop: StopRequest) -> None:
        self._broker_url = options.broker_url
        # Classic queues have no delivery limit; only a queue declared earlier may still be a quorum queue.
        self._unavailable_level = logging.WARNING if options.QUEUE_TYPE == "quorum" else logging.INFO
        self._url = options.MANAGEMENT_URL
        self._stop = stop
        self._known: dict[str, list[dict[str, Any]]] = {}
        self._used = self._known
        self._tried = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def have_changed(self) -> bool:
        """Have they changed since `refresh`?"""
        return self._known != self._used

    def refresh(self) -> None:
        """Use the policies as they were last read. The first call starts reading, and waits a moment for the answer."""
        if self._thread is None and speaks_amqp(self._broker_url):
            self._thread = threading.Thread(target=self._read_on, name="policies", daemon=True)
            self._thread.start()
            self._tried.wait(_TIMEOUT_SECONDS)
        self._used = self._known

    def delivery_limit(self, queue: str) -> str:
        """Why its policies forbid receiving from this queue, with the remedy; "" if no limit is known."""
        for kind, policies in self._used.items():
            policy = _effective(policies, queue)
            limit = policy["definition"].get("delivery-limit") if policy else None
            if policy and isinstance(limit, int) and limit >= 0:
                command = "set_policy" if kind == "policies" else "set_operator_policy"
                return (
                    f"The queue {queue!r} drops a message that has been delivered {limit} times, because of the policy "
                    f"{policy['name']!r} of the virtual host {policy['vhost']!r}. Remove 'delivery-limit' from the policy, or "
                    f"change its pattern {policy['pattern']!r} so that it does not match this queue (rabbitmqctl {command})."
                )
        return ""

    def _read_on(self) -> None:
        broker = kombu.Connection(self._broker_url)
        if not (url := self._url or _default_url(self._broker_url, broker)):
            logger.log(
                self._unavailable_level,
                "consumer: the management API of RabbitMQ is not queried, because the broker does not use its default port. "
                "Delivery limits set by policies are not detected. Set INBOX['MANAGEMENT_URL'] to the URL of the API.",
            )
            self._tried.set()
            return
        seconds = 0.0
        while not self._stop.wait(seconds):
            seconds = self._read(url, broker)
            self._tried.set()

    def _read(self, url: str, broker: kombu.Connection) -> float:
        """Read the policies; the seconds until the next time."""
        try:
            self._known = {kind: _get(url, broker, kind) for kind in _KINDS}
        except Exception as error:  # noqa: BLE001 - whatever an API answers
            logger.log(
                logging.WARNING if self._url else self._unavailable_level,
                "consumer: the management API of RabbitMQ at %s is unavailable (%s). Delivery limits set by policies are not "
                "detected. The next query is in %.0f minutes. Check INBOX['MANAGEMENT_URL'].",
                masked(url),
                describe(error),
                _RETRY_SECONDS / 60,
            )
            self._unavailable_level = logging.INFO
            return _RETRY_SECONDS
        return _POLL_SECONDS


def _get(url: str, broker: kombu.Connection, kind: str) -> list[dict[str, Any]]:
    at = urlsplit(url)
    user, password = (at.username, at.password) if at.username else (broker.userid or "guest", broker.password or "guest")
    credentials = base64.b64encode(f"{user}:{password}".encode()).decode()
    connection = (HTTPSConnection if at.scheme == "https" else HTTPConnection)(
        at.hostname or "", at.port, timeout=_TIMEOUT_SECONDS
    )
    connection.connect()
    # Of the class socket, because that of an SSLSocket would let the reading thread go on unencrypted.
    end = threading.Timer(_LONGEST_SECONDS, partial(socket.socket.shutdown, connection.sock, socket.SHUT_RDWR))
    end.daemon = True
    end.start()
    try:
        path = f"{at.path.rstrip('/')}/api/{kind}/{quote(broker.virtual_host or '/', safe='')}"
        connection.request("GET", path, headers={"Authorization": f"Basic {credentials}", "Connection": "close"})
        answer = connection.getresponse()
        if answer.status != HTTPStatus.OK:
            raise OSError(f"it answered {answer.status} {answer.reason}")
        policies = json.load(answer)
    finally:
        end.cancel()
        connection.close()
    if not isinstance(policies, list):
        raise TypeError("its answer is not a list")
    return policies


def _effective(policies: list[dict[str, Any]], queue: str) -> dict[str, Any] | None:
    """The policy that applies to a quorum queue of this name: the match with the highest priority."""
    matching = [policy for policy in policies if policy["apply-to"] in _APPLIES and _matches(policy["pattern"], queue)]
    return max(matching, key=lambda policy: policy["priority"], default=None)


def _matches(pattern: str, queue: str) -> bool:
    try:
        return re.search(pattern, queue) is not None
    except re.error:  # Erlang's regular expressions have Perl's syntax: assume a match
        return True


def _default_url(broker_url: str, broker: kombu.Connection) -> str:
    """The default URL of the API, if the broker uses its default port; else "", because the API's port is unknown."""
    port, scheme, api_port = _DEFAULTS[scheme_of(broker_url)]
    return f"{scheme}://{broker.hostname}:{api_port}" if (broker.port or port) == port else ""
