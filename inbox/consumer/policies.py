"""The RabbitMQ policies of a queue. AMQP does not show them, so the management API is queried.

A delivery limit set by a policy applies in addition to the queue's own argument: RabbitMQ takes the lower one. The API is
queried at `INBOX["MANAGEMENT_URL"]`, or at its default port if the broker uses its default port. Without an answer, such limits
are not detected.

A thread of its own does this, with a limit for the whole request: the API must not delay the thread that receives.
"""

from __future__ import annotations

import logging
import re
import threading
from typing import Any

import kombu

from exactly_once.broker import speaks_amqp
from exactly_once.management_api import default_url, read_list
from exactly_once.masking import masked
from exactly_once.process.loop import StopRequest
from exactly_once.wire.text import describe
from inbox.conf import InboxOptions

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 2.0
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
        if not (url := self._url or default_url(self._broker_url, broker)):
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
            self._known = {kind: read_list(url, broker, kind) for kind in _KINDS}
        except Exception as error:  # noqa: BLE001 - whatever an API answers
            logger.log(
                logging.WARNING if self._url else self._unavailable_level,
                "consumer: the management API of RabbitMQ at %s is unavailable (%s). Delivery limits set by policies are not "
                "detected. Enable the plugin rabbitmq_management, or set INBOX['MANAGEMENT_URL']. The next query is in %.0f "
                "minutes.",
                masked(url),
                describe(error),
                _RETRY_SECONDS / 60,
            )
            self._unavailable_level = logging.INFO
            return _RETRY_SECONDS
        return _POLL_SECONDS


def _effective(policies: list[dict[str, Any]], queue: str) -> dict[str, Any] | None:
    """The policy that applies to a quorum queue of this name: the match with the highest priority."""
    matching = [policy for policy in policies if policy["apply-to"] in _APPLIES and _matches(policy["pattern"], queue)]
    return max(matching, key=lambda policy: policy["priority"], default=None)


def _matches(pattern: str, queue: str) -> bool:
    try:
        return re.search(pattern, queue) is not None
    except re.error:  # Erlang's regular expressions have Perl's syntax: assume a match
        return True
