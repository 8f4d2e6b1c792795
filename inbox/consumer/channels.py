"""The channel of one subscription: bodies are received unchanged, and deliveries acknowledged many at once where possible.

kombu inflates a compressed body, and py-amqp decodes it by its content encoding, as soon as it arrives: without a limit, on the
thread that owns the connection, and before the inbox knows which message it is. This module disables both; see
`inbox.receiving.reading`.

For RabbitMQ, an ack with `multiple` ("this tag and all before it") costs as much as a single ack; all earlier tags must be
settled. So one frame acknowledges the settled tags up to the first unsettled one. The later ones are acknowledged singly.
"""

from functools import cache, partial
from typing import Any

import kombu
from amqp import spec

from exactly_once.wire.envelope import COMPRESSION

_ANSWER_SECONDS = 4.0
"""Shorter than between two heartbeats of the broker, each of which begins the wait again."""


class Acks:
    """The outstanding deliveries of `channel`. Only for the thread that owns the connection.

    Attributes:
        is_open: for any thread: the channel has not ended. After it has, the broker delivers its messages again.
    """

    def __init__(self, channel: Any, *, multiple: bool) -> None:
        self.is_open = True
        self._channel = channel
        self._multiple = multiple
        self._outstanding: dict[Any, None] = {}
        self._settled: set[Any] = set()

    def __len__(self) -> int:
        return len(self._outstanding)

    def close(self) -> None:
        self.is_open = False
        self._channel.close()

    def delivered(self, message: kombu.Message) -> None:
        self._outstanding[message.delivery_tag] = None

    def settle(self, message: kombu.Message) -> None:
        """Mark it to be acknowledged by the next `flush`."""
        self._settled.add(message.delivery_tag)

    def requeue(self, message: kombu.Message) -> None:
        """Return it to the broker, which delivers it again."""
        if self._multiple:
            # Unlike basic.reject, RabbitMQ 4.3+ does not count this as a failed delivery. py-amqp has no method for it.
            self._channel.send_method(spec.Basic.Nack, "Lbb", (message.delivery_tag, False, True))
        else:
            message.requeue()
        self._outstanding.pop(message.delivery_tag, None)

    def flush(self) -> None:
        if not self._settled:
            return
        if self._multiple:
            self._flush_front()
        for tag in self._settled:
            self._channel.basic_ack(tag)
            self._outstanding.pop(tag, None)
        self._settled.clear()

    def _flush_front(self) -> None:
        last = None
        for tag in self._outstanding:
            if tag not in self._settled:
                break
            last = tag
            self._settled.discard(tag)
        if last is None:
            return
        self._channel.basic_ack(last, multiple=True)
        while (tag := next(iter(self._outstanding))) != last:
            del self._outstanding[tag]
        del self._outstanding[last]


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


def answering_in_time(channel: Any) -> Any:
    """The channel of a subscription, which raises TimeoutError while the broker does not answer it: a single queue may hang."""
    channel.wait = partial(channel.wait, timeout=_ANSWER_SECONDS)
    return channel
