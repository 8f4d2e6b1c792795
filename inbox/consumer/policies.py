"""The RabbitMQ policies of a queue. AMQP does not show them, so the management API is queried.

A delivery limit set by a policy applies in addition to the queue's own argument: RabbitMQ takes the lower one. The API is
queried at `INBOX["MANAGEMENT_URL"]`, or at its default port if the broker uses its default port. Without an answer, such limits
are not detected.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from http.client import HTTPException
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import kombu

from inbox.conf import InboxOptions
from outbox.kernel.broker import scheme_of, speaks_amqp
from outbox.kernel.clock import monotonic
from outbox.kernel.masking import masked
from outbox.kernel.text import describe

logger = logging.getLogger(__name__)

_DEFAULTS = {"amqp": (5672, "http", 15672), "pyamqp": (5672, "http", 15672), "amqps": (5671, "https", 15671)}
"""By the broker's scheme: its default port, and the scheme and default port of the API."""
_TIMEOUT_SECONDS = 2.0
_RETRY_SECONDS = 600.0
_APPLIES = {"all", "queues", "quorum_queues"}
_KINDS = ("policies", "operator-policies")


class Policies:
    """Used by the thread that owns the broker connection."""

    def __init__(self, options: InboxOptions) -> None:
        self._broker_url = options.broker_url
        self._has_api = speaks_amqp(options.broker_url)
        # Classic queues have no delivery limit; only a queue declared earlier may still be a quorum queue.
        self._unavailable_level = logging.WARNING if options.QUEUE_TYPE == "quorum" else logging.INFO
        self._url = options.MANAGEMENT_URL
        self._read_at = float("-inf")
        self._known: dict[str, list[dict[str, Any]]] = {}
        self._opener = build_opener(ProxyHandler({}))

    def delivery_limit(self, queue: str) -> str:
        """Why its policies forbid receiving from this queue, with the remedy; "" if no limit is known."""
        for kind, policies in self._known.items():
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

    def refresh(self) -> None:
        """Read the current policies."""
        if not self._has_api or monotonic() < self._read_at:
            return
        broker = kombu.Connection(self._broker_url)
        if not (url := self._url or _default_url(self._broker_url, broker)):
            self._read_at = float("inf")
            logger.log(
                self._unavailable_level,
                "consumer: the management API of RabbitMQ is not queried, because the broker does not use its default port. "
                "Delivery limits set by policies are not detected. Set INBOX['MANAGEMENT_URL'] to the URL of the API.",
            )
            return
        try:
            self._known = {kind: self._get(url, broker, kind) for kind in _KINDS}
        except (OSError, HTTPException, ValueError) as error:
            self._read_at = monotonic() + _RETRY_SECONDS
            logger.log(
                logging.WARNING if self._url else self._unavailable_level,
                "consumer: the management API of RabbitMQ at %s is unavailable (%s). Delivery limits set by policies are not "
                "detected. The next query is in %.0f minutes. Check INBOX['MANAGEMENT_URL'].",
                masked(url),
                describe(error),
                _RETRY_SECONDS / 60,
            )
            self._unavailable_level = logging.INFO

    def _get(self, url: str, broker: kombu.Connection, kind: str) -> list[dict[str, Any]]:
        at = urlsplit(url)
        user, password = (at.username, at.password) if at.username else (broker.userid or "guest", broker.password or "guest")
        base = f"{at.scheme}://{at.netloc.rpartition('@')[2]}{at.path.rstrip('/')}"
        vhost = quote(broker.virtual_host or "/", safe="")
        request = Request(f"{base}/api/{kind}/{vhost}")  # noqa: S310 - http or https, as the option demands
        request.add_header("Authorization", f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}")
        with self._opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
            policies = json.load(answer)
        if not isinstance(policies, list):
            raise ValueError("its answer is not a list")  # noqa: TRY004 - a malformed answer, not a wrong argument
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
