"""A message in the format of another protocol, for a consumer that does not read this project's envelopes: a Celery worker.

`publish` stores it with the row as text, so the relay sends exactly that exchange, routing key, properties and headers. A JSON
column would not preserve it: PostgreSQL's jsonb refuses a NUL in a string and turns large floats into whole numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kombu.utils.json import dumps, loads

CELERY_TOPICS = "celery."
"""Prefix of the topic of a Celery message; the name of its task follows."""
WEBHOOK_HANDLERS = "webhook/"
"""Prefix of the handler of the messages to one webhook endpoint; the name of the endpoint follows."""
RUN_ELSEWHERE = (CELERY_TOPICS, WEBHOOK_HANDLERS)
"""Handlers with such a name exist although `inbox_consume` does not run them: Celery and `inbox_outgoing_webhooks` do."""


class Wire(NamedTuple):
    """A message without its body, in the terms of kombu.

    Attributes:
        exchange: its name; "" is the broker's default exchange, which routes to every queue by its name.
        exchange_type: the type to declare on brokers that store no exchanges (Redis).
        routing_key: for the default exchange, the name of the queue.
        content_type, content_encoding: of the body.
        priority: the broker's message priority; None for none.
        headers: may be nested, and contain None, dates, Decimals, UUIDs and bytes.
        properties: other AMQP properties, `correlation_id`, `reply_to`, `delivery_mode`, `expiration` … by name.
    """

    exchange: str
    exchange_type: str
    routing_key: str
    content_type: str
    content_encoding: str
    priority: int | None
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]

    def to_text(self) -> str:
        """The text for a column: JSON in ASCII.

        Raises:
            TypeError, ValueError, RecursionError: a header or a property cannot be serialised.
        """
        text: str = dumps(self._asdict(), separators=(",", ":"))
        return text

    @classmethod
    def from_text(cls, text: str) -> Wire:
        """Parse the text of `to_text`.

        Raises:
            TypeError, ValueError, RecursionError: another program wrote the text.
        """
        return cls(**loads(text))


PUBLISHED_SETS = "published-set."
"""Before the topic of the message at the end of a set: the topic of the message that lists the set, for its counter."""
