"""The RabbitMQ policies of a queue. AMQP does not show them, so the management API is queried.

A delivery limit set by a policy applies in addition to the queue's own argument: RabbitMQ takes the lower one. The API is
queried at `INBOX["MANAGEMENT_URL"]`, or at its default port if the broker uses its default port. Without an answer, such limits
are not detected.

They are read when the consumer connects to the broker, and again while a queue may not be received from.
"""

import logging
import re
from typing import Any

import kombu

from exactly_once.broker import speaks_amqp
from exactly_once.management_api import default_url, read_list
from exactly_once.masking import masked
from exactly_once.wire.text import describe
from inbox.conf import InboxOptions

logger = logging.getLogger(__name__)

_APPLIES = {"all", "queues", "quorum_queues"}
_KINDS = ("policies", "operator-policies")


class Policies:
    """The policies as they were last read."""

    def __init__(self, options: InboxOptions) -> None:
        self._broker_url = options.broker_url
        # Classic queues have no delivery limit; only a queue declared earlier may still be a quorum queue.
        self._unavailable_level = logging.WARNING if options.QUEUE_TYPE == "quorum" else logging.INFO
        self._url = options.MANAGEMENT_URL
        self._known: dict[str, list[dict[str, Any]]] = {}

    def read(self) -> None:
        """Read them, within a few seconds. Without an answer they stay as they were."""
        if not speaks_amqp(self._broker_url):
            return
        broker = kombu.Connection(self._broker_url)
        if not (url := self._url or default_url(self._broker_url, broker)):
            self._log_unavailable("is not queried, because the broker does not use its default port")
            return
        try:
            self._known = {kind: read_list(url, broker, kind) for kind in _KINDS}
        except Exception as error:  # noqa: BLE001 - whatever an API answers
            self._log_unavailable(f"at {masked(url)} is unavailable ({describe(error)})")

    def _log_unavailable(self, why: str) -> None:
        logger.log(
            self._unavailable_level,
            "consumer: the management API of RabbitMQ %s. Delivery limits set by policies are not detected. Enable the plugin "
            "rabbitmq_management, or set INBOX['MANAGEMENT_URL'] to the URL of the API. It is queried again at the next "
            "connection to the broker.",
            why,
        )
        self._unavailable_level = logging.INFO

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


def _effective(policies: list[dict[str, Any]], queue: str) -> dict[str, Any] | None:
    """The policy that applies to a quorum queue of this name: the match with the highest priority."""
    matching = [policy for policy in policies if policy["apply-to"] in _APPLIES and _matches(policy["pattern"], queue)]
    return max(matching, key=lambda policy: policy["priority"], default=None)


def _matches(pattern: str, queue: str) -> bool:
    try:
        return re.search(pattern, queue) is not None
    except re.error:  # Erlang's regular expressions have Perl's syntax: assume a match
        return True
