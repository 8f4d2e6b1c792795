"""A message in the form of another protocol, for consumers that know nothing of ours: a Celery worker.

It is kept with the row from the moment it is written, as text, so that what is sent is what was said then: where to, with which
properties, with which headers. JSON of a database would not do: it refuses a NUL in a text and turns large floats into whole
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kombu.utils.json import dumps, loads

CELERY_TOPICS = "celery."
"""What the topic of a Celery message begins with; the rest is the name of its task."""


class Wire(NamedTuple):
    """Everything of a message but its body, as kombu takes it.

    Attributes:
        exchange: its name; "" is the broker's default exchange, which knows every queue by its name.
        exchange_type: of brokers that keep no exchanges themselves (Redis), what it has to be declared as.
        routing_key: of the default exchange, the name of the queue.
        content_type, content_encoding: of the body.
        priority: as the broker understands it; None is none.
        headers: may be nested, and hold None, dates, Decimals, UUIDs and bytes.
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
        """The form for a column: JSON, in ASCII.

        Raises:
            TypeError, ValueError, RecursionError: a header or a property cannot be written so.
        """
        text: str = dumps(self._asdict(), separators=(",", ":"))
        return text

    @classmethod
    def from_text(cls, text: str) -> Wire:
        """What `to_text` wrote.

        Raises:
            TypeError, ValueError, RecursionError: it was written by somebody else's hand.
        """
        return cls(**loads(text))
