"""The queue that the messages end up in, and the proof of what arrived there.

Counting is not enough: for every committed message it is checked that exactly its message id arrived under its number, once,
and after the earlier messages of its key. The queue is read after the timed part of a run, never during it, unless the
benchmark is about arriving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

import amqp

from benchmarks.lab.broker import connected
from benchmarks.lab.processes import Process
from benchmarks.lab.project import Project
from benchmarks.lab.waiting import Progress, ProgressWatch
from benchmarks.lab.workload import EXCHANGE, QUEUE, TOPIC, number_of

PREFETCH = 2000
ACK_EVERY = 500
TICK_SECONDS = 0.5
ID_BYTES = 16
NOTHING = bytes(ID_BYTES)
GROWTH_BYTES = 1 << 20


def fresh_queue(project: Project, topics: Iterable[str] = (TOPIC,)) -> None:
    """An empty quorum queue bound to the outbox's exchange; the old one is deleted with its messages."""
    with connected(project.broker_url) as connection:
        channel = connection.channel()
        channel.exchange_declare(EXCHANGE, "topic", durable=True, auto_delete=False)
        channel.queue_delete(QUEUE)
        channel.queue_declare(QUEUE, durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"})
        for topic in topics:
            channel.queue_bind(QUEUE, EXCHANGE, topic)


def queued(project: Project) -> int:
    """Messages that are in the queue now, as its leader counts them."""
    return project.queue_lengths()[QUEUE]


def in_queue(project: Project, count: int) -> Progress:
    """The progress of a queue without a consumer towards this number of messages."""
    return Progress(project=project, what="messages in the queue", goal=count, current=lambda: queued(project))


def at_consumer(project: Project, arrivals: Arrivals, count: int) -> Progress:
    """The progress of our own consumer towards this number of messages."""
    return Progress(project=project, what="messages at the consumer", goal=count, current=lambda: arrivals.taken)


def consume(progress: Progress, on_message: Callable[[amqp.Message], object], *processes: Process) -> None:
    """Take messages off the queue until the goal is reached.

    Raises:
        ProcessFailed: one of the processes has ended before.
        Stalled: no more come.
    """
    watch = ProgressWatch(progress, *processes)
    consume_until(progress.project, on_message, until=lambda: progress.reached, when_silent=watch.check)


def consume_until(
    project: Project,
    on_message: Callable[[amqp.Message], object],
    *,
    until: Callable[[], bool],
    when_silent: Callable[[], object] = bool,
) -> None:
    """Take messages off the queue, oldest first, until `until` holds; acked many at a time."""
    with connected(project.broker_url) as connection:
        channel = connection.channel()
        channel.basic_qos(0, PREFETCH, False)
        unacked: list[int] = []

        def ack() -> None:
            if unacked:
                channel.basic_ack(unacked[-1], multiple=True)
                unacked.clear()

        def take(message: amqp.Message) -> None:
            on_message(message)
            unacked.append(message.delivery_tag)
            if len(unacked) == ACK_EVERY:
                ack()

        channel.basic_consume(QUEUE, callback=take)
        while not until():
            try:
                connection.drain_events(timeout=TICK_SECONDS)
            except TimeoutError:
                when_silent()
        ack()


class Arrivals:
    """What has arrived, in 16 bytes a message, to be judged against what was committed."""

    def __init__(self) -> None:
        self.taken = 0
        self._duplicates = 0
        self._out_of_order = 0
        self._ids = bytearray()
        self._latest_of_key: dict[str, int] = {}

    def take(self, message: amqp.Message) -> None:
        """A message as the outbox sends it."""
        headers = message.properties["application_headers"]
        self.note(
            number=number_of(headers["cloudEvents:bizid"]),
            message_id=UUID(message.properties["message_id"]),
            key=headers.get("cloudEvents:orderingkey", ""),
        )

    def note(self, number: int, message_id: UUID, key: str = "") -> None:
        self.taken += 1
        end = ID_BYTES * (number + 1)
        if len(self._ids) < end:
            self._ids.extend(bytes(max(end - len(self._ids), GROWTH_BYTES)))
        if self._id_of(number) != NOTHING:
            self._duplicates += 1
            return
        self._ids[end - ID_BYTES : end] = message_id.bytes
        if key:
            if number < self._latest_of_key.get(key, -1):
                self._out_of_order += 1
            self._latest_of_key[key] = number

    def faults(self, committed: Iterable[tuple[UUID, int]]) -> str:
        """What is wrong with them, given the message id and number of everything that was committed; "" when nothing is."""
        lost = wrong = found = 0
        for message_id, number in committed:
            arrived = self._id_of(number)
            if arrived == NOTHING:
                lost += 1
                continue
            found += 1
            wrong += arrived != message_id.bytes
        faults = {
            "lost": lost,
            "with a wrong id": wrong,
            "twice": self._duplicates,
            "never committed": self.taken - self._duplicates - found,
            "before an earlier one of their key": self._out_of_order,
        }
        return ", ".join(f"{count:,} {what}" for what, count in faults.items() if count)

    def _id_of(self, number: int) -> bytes:
        return bytes(self._ids[ID_BYTES * number : ID_BYTES * (number + 1)]) or NOTHING


def collect(project: Project, arrivals: Arrivals, read: Callable[[Arrivals, Any], object] = Arrivals.take) -> Arrivals:
    """Take everything that is in the queue now. `read` records one message, by default one of the outbox's."""
    expected = arrivals.taken + queued(project)
    consume(at_consumer(project, arrivals, expected), lambda message: read(arrivals, message))
    return arrivals
