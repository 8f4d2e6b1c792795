"""The messages that the broker received, in their order: a queue that has no consumer before the end.

The load is written in transactions of many messages, most of them with a key and all of those with strict_order: so the order
of a key is that of its rows, and an earlier message must have arrived first.
"""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import kombu
from django.db import DatabaseError, InterfaceError, transaction

from outbox import Draft, publish_many
from outbox.models import OutboxMessage
from tests.support.crash.world import PATIENCE_SECONDS
from tests.support.threads import in_threads
from tests.support.workers import CONFIRMED

TOPIC = "crash.ordered"
KEYS = [f"key-{number}" for number in range(16)]


class Witness:
    """A durable queue for everything of `TOPIC`."""

    def __init__(self, broker_url: str) -> None:
        self._url = broker_url
        exchange = kombu.Exchange("outbox", "topic", durable=True)
        self._queue = kombu.Queue("witness", exchange, TOPIC, durable=True)
        with kombu.Connection(broker_url) as broker:
            self._queue(broker.default_channel).declare()

    def arrivals(self) -> list[str]:
        """The message ids of everything that is in the queue now, in the order of their arrival, duplicates among them."""
        arrived: list[str] = []
        end = str(uuid.uuid4())

        def record(body: Any, message: Any) -> None:
            arrived.append(message.properties["message_id"])

        with kombu.Connection(self._url, transport_options=CONFIRMED) as broker:
            # It arrives after all other messages, so no silence has to be interpreted as the end.
            broker.Producer().publish({}, routing_key=self._queue.name, message_id=end)
            with kombu.Consumer(broker, [self._queue], callbacks=[record], no_ack=True, accept=["json"]):
                while arrived[-1:] != [end]:
                    broker.drain_events(timeout=PATIENCE_SECONDS)
        return arrived[:-1]

    def assert_nothing_went_wrong(self) -> int:
        """Everything that was committed has arrived and nothing else, in order, at the first attempt; how many duplicates."""
        rows = {
            str(message_id): (position, key)
            for message_id, position, key in OutboxMessage.objects.values_list("message_id", "id", "key")
        }
        assert rows, "nothing was committed, so nothing is proved"
        assert not OutboxMessage.objects.exclude(state="published", attempts=1, last_error="").exists(), "an attempt was burnt"
        arrived = self.arrivals()
        assert set(arrived) <= rows.keys(), "something came that was never committed"
        assert set(arrived) == rows.keys(), f"{len(rows.keys() - set(arrived))} of {len(rows)} messages are lost"
        last: dict[str, int] = {}
        for message_id in dict.fromkeys(arrived):
            position, key = rows[message_id]
            assert not key or position > last.get(key, 0), f"{position} of {key} came after {last[key]}"
            last[key] = position
        return len(arrived) - len(rows)


def write(number: int, *, chance: random.Random | None = None, padding: int = 0) -> None:
    """Commit this many messages in one transaction; three of four have a key."""
    chance = chance or random.Random(number)
    keys = [chance.choice(KEYS) if chance.random() < 0.75 else "" for _ in range(number)]
    with transaction.atomic():
        publish_many([Draft(TOPIC, {"padding": padding * "-"}, key=key, strict_order=bool(key)) for key in keys])


@contextmanager
def writing(seed: int, *, writers: int = 2, number: int = 40, pause_seconds: float = 0.03) -> Iterator[None]:
    """Writers at work during the block; some of their transactions are rolled back."""
    enough = threading.Event()

    def work(chance: random.Random) -> None:
        while not enough.wait(pause_seconds):
            with suppress(DatabaseError, InterfaceError), transaction.atomic():
                write(number, chance=chance)
                transaction.set_rollback(chance.random() < 0.1)

    with in_threads(*(partial(work, random.Random(f"{seed}-{n}")) for n in range(writers)), stop=enough):
        yield


def open_messages() -> Any:
    return OutboxMessage.objects.exclude(state="published")


def everything_is_published() -> bool:
    return not open_messages().exists()


def published() -> int:
    return OutboxMessage.objects.filter(state="published").count()
