"""Receive message bodies unchanged.

kombu inflates a compressed body, and py-amqp decodes it by its content encoding, as soon as it arrives: without a limit, on the
thread that owns the connection, and before the inbox knows which message it is. This module
disables both; see `inbox.receiving.reading`.
"""

from functools import cache
from typing import Any

from exactly_once.wire.envelope import COMPRESSION


def receiving_bodies_as_sent(channel: Any) -> Any:
    """Make `channel` leave the bodies of its deliveries unchanged."""
    channel.Message = _as_sent(channel.Message)
    if hasattr(channel, "auto_decode"):
        channel.auto_decode = False
    return channel


@cache
def _as_sent(kind: type[Any]) -> type[Any]:
    class AsSent(kind):  # type: ignore[misc] # kombu's class for this transport
        # kombu does not inflate the body of a message that has errors.
        errors: Any = ("not inflated",)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.errors = []

        def serializable(self) -> Any:
            """The form that a virtual transport requeues. kombu's own form omits the compression header."""
            stored = super().serializable()
            if COMPRESSION in self.headers:
                stored["headers"][COMPRESSION] = self.headers[COMPRESSION]
            return stored

    return AsSent
