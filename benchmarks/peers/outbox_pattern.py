"""django-outbox-pattern: a table relayed over STOMP, without confirms and without persistence, because it has neither.

It settles everything that is waiting in one transaction, so its clock runs from the first send to the end of that transaction.
"""

from __future__ import annotations

import os
import time
from typing import Any
from urllib.parse import urlsplit

from benchmarks.lab.workload import EXCHANGE, TOPIC, payload
from benchmarks.peers.driving import configure_django, migrate, run

DESTINATION = f"/exchange/{EXCHANGE}/{TOPIC}"


def prepare(count: int) -> list[list[Any]]:
    from django_outbox_pattern.headers import get_message_headers  # noqa: PLC0415 - needs Django
    from django_outbox_pattern.models import Published  # noqa: PLC0415

    migrate()
    rows = [Published(destination=DESTINATION, body=payload(number)) for number in range(count)]
    for row in rows:
        row.headers = get_message_headers(row)  # as its save() does
    Published.objects.bulk_create(rows, batch_size=500)
    return [[str(row.id), number] for number, row in enumerate(rows)]


def drain(count: int) -> dict[str, Any]:
    from django_outbox_pattern.choices import StatusChoice  # noqa: PLC0415 - needs Django
    from django_outbox_pattern.factories import factory_producer  # noqa: PLC0415
    from django_outbox_pattern.models import Published  # noqa: PLC0415
    from django_outbox_pattern.producers import Producer  # noqa: PLC0415

    first_sent: list[float] = []
    send = Producer.send

    def timed(self: Producer, message: Published, **options: Any) -> int:
        if not first_sent:
            first_sent.append(time.monotonic())
        return send(self, message, **options)

    Producer.send = timed
    producer = factory_producer()
    while Published.objects.filter(status=StatusChoice.SCHEDULE).exists():
        producer.publish_message_from_database()
        ended = time.monotonic()
    return {"messages": count, "seconds": ended - first_sent[0], "faults": ""}


def settings() -> dict[str, Any]:
    broker = urlsplit(os.environ["BROKER_URL"])
    return {
        "DEFAULT_STOMP_HOST_AND_PORTS": [(broker.hostname, int(os.environ["STOMP_PORT"]))],
        "DEFAULT_STOMP_VHOST": broker.path[1:],
        "DEFAULT_STOMP_USERNAME": broker.username,
        "DEFAULT_STOMP_PASSCODE": broker.password,
        "DEFAULT_PRODUCER_WAITING_TIME": 0,
    }


if __name__ == "__main__":
    configure_django("django_outbox_pattern", DJANGO_OUTBOX_PATTERN=settings())
    run(prepare, drain)
