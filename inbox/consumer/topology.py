"""Which queue belongs to which handler.

One queue per group, handler and topic, bound to the shared topic exchange. The topic is part of the name, so that during a
rolling deploy an old worker never takes messages of a topic that only the new code knows.
"""

from __future__ import annotations

from typing import Any

import kombu

from inbox.conf import InboxOptions
from inbox.handlers import Handler
from outbox.kernel.broker import EXCHANGE_TYPE, speaks_amqp
from outbox.kernel.text import fit

# RabbitMQ 4 drops a message after 20 redeliveries from a quorum queue without a dead-letter exchange. Attempts are counted in
# the database; the broker must not count on its own.
_NEVER = 1_000_000_000


def queue_name(handler: Handler, options: InboxOptions) -> str:
    return fit(f"{options.group}.{handler.name}@{handler.topic}")


def queue_of(handler: Handler, options: InboxOptions) -> kombu.Queue:
    """The durable queue of `handler`, not declared yet."""
    arguments: dict[str, Any] = {}
    if speaks_amqp(options.broker_url):
        arguments["x-queue-type"] = options.QUEUE_TYPE
        if options.QUEUE_TYPE == "quorum":
            arguments["x-delivery-limit"] = _NEVER
    return kombu.Queue(
        queue_name(handler, options),
        exchange=kombu.Exchange(options.exchange, EXCHANGE_TYPE, durable=True),
        routing_key=handler.topic,
        durable=True,
        queue_arguments=arguments,
    )


def queues_of(handler: Handler, options: InboxOptions) -> list[kombu.Queue]:
    """The queues of `handler`, not declared yet: one, or its partitions."""
    return [queue_of(handler, options)]
