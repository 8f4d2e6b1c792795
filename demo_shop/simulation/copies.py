"""Copy some messages between the broker and the shop, byte for byte.

It listens on a queue of its own and republishes to the same exchange: same body, same headers, same message id. A copy
is sent at once, so that two consumers handle concurrent duplicates, or later, when the first has been handled.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from typing import Any

import kombu

from demo_shop.simulation.ledger import Deed, Ledger

HANDLERS = {
    "shop.order.placed": 1,
    "shop.order.sms_due": 1,
    "shop.order.review_due": 1,
    "stock.reserved": 1,
    "payment.received": 4,
    "shipment.sent": 2,
}
"""Topics that are copied, and how many handlers get each copy."""
PART_COPIED = 0.1
LONGEST_DELAY_SECONDS = 2.0
_PROPERTIES = ("content_type", "content_encoding", "message_id", "type", "delivery_mode", "priority", "correlation_id")


class Copier:
    """Copies about a tenth of the messages of one exchange."""

    def __init__(self, url: str, exchange: str, ledger: Ledger, rng: random.Random) -> None:
        self._url = url
        self._exchange = kombu.Exchange(exchange, type="topic", durable=True)
        self._ledger = ledger
        self._rng = rng
        self._copied: set[str] = set()
        self._delayed: list[tuple[float, int, Any]] = []
        self._order = itertools.count()

    def run(self, stop: threading.Event, may_begin: threading.Event, listens: threading.Event) -> None:
        """Copy until `stop`; set `listens` when the queue is bound.

        A queue that is bound to every topic makes every message routable. So this must not begin before the shop's own queues
        exist, or a message for a missing queue would end here without an error.
        """
        while not may_begin.wait(0.1):
            if stop.is_set():
                return
        with kombu.Connection(self._url, transport_options={"confirm_publish": True}) as connection:
            channel = connection.channel()
            bindings = [kombu.binding(self._exchange, topic) for topic in HANDLERS]
            queue = kombu.Queue("", bindings=bindings, exclusive=True)
            producer = connection.Producer()
            with connection.Consumer(queue(channel), on_message=self._hear, no_ack=True):
                listens.set()
                while not stop.is_set():
                    self._drain(connection)
                    self._send_due(producer)

    def _hear(self, message: Any) -> None:
        message_id = message.properties.get("message_id", "")
        is_ours = self._ledger.run.encode() in _raw(message.body)
        if message_id in self._copied or not is_ours:
            return
        if not self._copied or self._rng.random() < PART_COPIED:
            self._copied.add(message_id)
            due_at = time.monotonic() + self._rng.choice([0, LONGEST_DELAY_SECONDS]) * self._rng.random()
            heapq.heappush(self._delayed, (due_at, next(self._order), message))

    def _drain(self, connection: Any) -> None:
        try:
            connection.drain_events(timeout=0.1)
        except TimeoutError:
            connection.heartbeat_check()

    def _send_due(self, producer: Any) -> None:
        while self._delayed and self._delayed[0][0] <= time.monotonic():
            _, _, message = heapq.heappop(self._delayed)
            topic = message.delivery_info["routing_key"]
            self._ledger.done(Deed.INJECTED, HANDLERS[topic])
            self._ledger.done(Deed.COPIED, HANDLERS[topic])
            properties = {name: message.properties[name] for name in _PROPERTIES if message.properties.get(name) is not None}
            properties |= {"content_type": message.content_type, "content_encoding": message.content_encoding}
            producer.publish(
                _raw(message.body),
                exchange=self._exchange,
                routing_key=topic,
                headers=message.headers,
                declare=[],
                **properties,
            )


def _raw(body: bytes | str) -> bytes:
    return body if isinstance(body, bytes) else body.encode()
