"""Acknowledging what came on one channel, many deliveries at once where that is possible.

RabbitMQ takes "this one and all before it" as cheaply as one; that is right as long as all before it have been answered. So
the answered ones at the front of what is outstanding go with one frame, and those behind an unanswered one go singly.
"""

from __future__ import annotations

from typing import Any

import kombu
from amqp import spec


class Acks:
    """What is outstanding on `channel`. Used by the thread that owns the connection only."""

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
        """To be acknowledged with the next `flush`."""
        self._settled.add(message.delivery_tag)

    def requeue(self, message: kombu.Message) -> None:
        """Give it back, to be delivered again."""
        if self._multiple:
            # Unlike basic.reject, RabbitMQ from 4.3 on counts this as no failed delivery. py-amqp has no method for it.
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
