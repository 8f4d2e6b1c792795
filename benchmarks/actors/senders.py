"""Send a project's ready messages to the broker with no database in the timed part; print how long that took as JSON.

    python -m benchmarks.actors.senders raw|transport|lanes

`raw` is the fastest standard form of confirmed publishing with py-amqp: one connection, one channel, `amqp.Message` and
`Channel.basic_publish(mandatory=True)`, and a sliding window of unconfirmed messages instead of a wait after each.
`transport` is the outbox's own transport, in batches of the relay's size; `lanes` are two of those in two threads, each with
the messages of one half of the keys, as the relay has them.

All begin with the same envelopes in memory and an open connection, over which 500 messages have been sent and confirmed (500 in
each lane); the clock runs from the next publish to the last confirm.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import amqp
import django

from benchmarks.lab.arrivals import connected
from benchmarks.lab.confirms import Unconfirmed
from benchmarks.lab.workload import EXCHANGE
from exactly_once.wire.envelope import Envelope

WINDOW = 1000
PERSISTENT = 2
SILENCE_SECONDS = 30.0
UNTIMED = 500
"""Sent by each connection before its clock starts."""

Timed = tuple[int, float]
"""How many messages, in how many seconds."""


def raw(envelopes: Sequence[Envelope]) -> Timed:
    unconfirmed = Unconfirmed()
    with connected(os.environ["BROKER_URL"]) as connection:
        channel = connection.channel()
        unconfirmed.listen(channel)
        publish, tags, read = channel.basic_publish, unconfirmed.tags, connection.blocking_read

        def send(first: int, some: Sequence[Envelope]) -> None:
            for tag, envelope in enumerate(some, start=first):
                message = amqp.Message(
                    envelope.body,
                    content_type=envelope.content_type,
                    content_encoding="utf-8",
                    application_headers=envelope.to_headers(),
                    message_id=envelope.id,
                    type=envelope.topic,
                    delivery_mode=PERSISTENT,
                    priority=0,
                )
                publish(message, EXCHANGE, envelope.topic, mandatory=True)
                tags[tag] = None
                while len(tags) >= WINDOW:
                    read(SILENCE_SECONDS)
            while tags:
                read(SILENCE_SECONDS)

        send(1, envelopes[:UNTIMED])
        timed = envelopes[UNTIMED:]
        began = time.perf_counter()
        send(1 + UNTIMED, timed)
        seconds = time.perf_counter() - began
    if unconfirmed.refused:
        raise SystemExit(f"the broker refused {unconfirmed.refused} messages")
    return len(timed), seconds


def transport(envelopes: Sequence[Envelope], *, lanes: int) -> Timed:
    """All lanes start together; the last one to end stops the clock."""
    dealt: list[list[Envelope]] = [[] for _ in range(lanes)]
    for envelope in envelopes:
        dealt[zlib.crc32(envelope.key.encode()) % lanes].append(envelope)
    ready = threading.Barrier(lanes, timeout=2 * SILENCE_SECONDS)
    with ThreadPoolExecutor(lanes) as pool:
        clocks = list(pool.map(partial(_lane, ready=ready), dealt))
    began, ended = min(began for began, _ in clocks), max(ended for _, ended in clocks)
    return len(envelopes) - lanes * UNTIMED, ended - began


def _lane(envelopes: Sequence[Envelope], ready: threading.Barrier) -> tuple[float, float]:
    """When it began and ended, after its first batch."""
    from exactly_once.process.clock import monotonic  # noqa: PLC0415
    from exactly_once.transport.interface import OutgoingMessage, PublishOutcome, Sent  # noqa: PLC0415
    from outbox.conf import outbox_options  # noqa: PLC0415 - needs Django
    from outbox.transports import open_transport  # noqa: PLC0415

    options = outbox_options()
    messages = [OutgoingMessage(position=position, envelope=envelope) for position, envelope in enumerate(envelopes)]
    starts = range(UNTIMED, len(messages), options.BATCH_SIZE)
    batches = [messages[start : start + options.BATCH_SIZE] for start in starts]
    opened = open_transport(options.BROKER_URL, alias="default", exchange=options.EXCHANGE)
    opened.connect()

    def send(batch: Sequence[Any]) -> Sent:
        return opened.send(batch, monotonic() + SILENCE_SECONDS)

    answers = [send(messages[:UNTIMED])]
    ready.wait()
    began = time.perf_counter()
    answers += map(send, batches)
    ended = time.perf_counter()
    opened.close()
    confirmed = sum(verdict.outcome is PublishOutcome.CONFIRMED for answer in answers for verdict in answer.verdicts.values())
    if confirmed != len(envelopes):
        raise SystemExit(f"{confirmed} of {len(envelopes)} messages were confirmed")
    return began, ended


def ready_envelopes() -> list[Envelope]:
    from outbox.conf import outbox_options  # noqa: PLC0415 - needs Django
    from outbox.models import OutboxMessage  # noqa: PLC0415
    from outbox.states import State  # noqa: PLC0415

    source = outbox_options().source
    return [
        Envelope(
            id=str(row.message_id),
            topic=row.topic,
            source=source,
            created_at=row.created_at,
            biz_id=row.biz_id,
            key=row.key,
            correlation_id=row.correlation_id,
            causation_id=row.causation_id,
            traceparent=row.traceparent,
            body=bytes(row.body),
        )
        for row in OutboxMessage.objects.filter(state=State.READY).order_by("id").iterator()
    ]


def main() -> None:
    senders: dict[str, Callable[[Sequence[Envelope]], Timed]] = {
        "raw": raw,
        "transport": partial(transport, lanes=1),
        "lanes": partial(transport, lanes=2),
    }
    messages, seconds = senders[sys.argv[1]](ready_envelopes())
    print(json.dumps({"messages": messages, "seconds": seconds}))


if __name__ == "__main__":
    django.setup()
    main()
