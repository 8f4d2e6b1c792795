"""Acknowledging the deliveries of one channel, many at once where possible.

For RabbitMQ, an ack with `multiple` ("this tag and all before it") costs as much as a single ack; all earlier tags must be
settled. So one frame acknowledges the settled tags up to the first unsettled one. The later ones are acknowledged singly.
"""

from typing import Any

import kombu
from amqp import spec


class Acks:
    """The outstanding deliveries of `channel`. Only for the thread that owns the connection."""

    def __init__(self, channel: Any, *, multiple: bool) -> None:
        self._channel = channel
        self._multiple = multiple
        self._outstanding: dict[Any, None] = {}
        self._settled: set[Any] = set()

    def __len__(self) -> int:
        return len(self._outstanding)

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
