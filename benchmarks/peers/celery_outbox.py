"""django-celery-outbox: Celery tasks through a table, with confirms, which are off by default."""

from __future__ import annotations

import logging
import os
import signal
import time
import uuid
from typing import Any

from benchmarks.lab.workload import EXCHANGE, QUEUE, TOPIC, payload
from benchmarks.peers.driving import configure_django, migrate, run

TASK = "benchmarks.task"


def prepare(count: int) -> list[list[Any]]:
    from django_celery_outbox.models import CeleryOutbox  # noqa: PLC0415 - needs Django

    migrate()
    ids = [str(uuid.uuid4()) for _ in range(count)]
    CeleryOutbox.objects.bulk_create(
        (CeleryOutbox(task_id=ids[number], task_name=TASK, args=[payload(number)]) for number in range(count)),
        batch_size=500,
    )
    return [[task_id, number] for number, task_id in enumerate(ids)]


def drain(count: int, publish_concurrency: int, batch_size: int) -> dict[str, Any]:
    from django_celery_outbox.app import OutboxCelery  # noqa: PLC0415 - needs Django
    from django_celery_outbox.relay import Relay, RelayConfig  # noqa: PLC0415
    from django_celery_outbox.relay._mutations import RelayMutations  # noqa: PLC0415
    from kombu import Exchange, Queue  # noqa: PLC0415

    app = OutboxCelery("benchmarks")
    app.conf.update(
        broker_url=os.environ["BROKER_URL"],
        broker_transport_options={"confirm_publish": True},
        broker_pool_limit=publish_concurrency + 2,
        task_default_queue=QUEUE,
        task_queues=[
            Queue(QUEUE, Exchange(EXCHANGE, "topic"), routing_key=TOPIC, queue_arguments={"x-queue-type": "quorum"}),
        ],
    )
    settled: list[tuple[float, int]] = []
    delete_published = RelayMutations.delete_published

    def timed(self: RelayMutations, ids: list[int]) -> None:
        delete_published(self, ids)
        settled.append((time.monotonic(), len(ids)))
        if sum(rows for _, rows in settled) >= count:
            os.kill(os.getpid(), signal.SIGTERM)

    RelayMutations.delete_published = timed
    config = RelayConfig.init(batch_size=batch_size, idle_time=0.01, publish_concurrency=publish_concurrency)
    Relay(app=app, config=config).start()
    (began, first), (ended, _) = settled[0], settled[-1]
    return {"messages": sum(rows for _, rows in settled) - first, "seconds": ended - began, "faults": ""}


def quiet() -> None:
    """A log line for every message would dominate the result."""
    import structlog  # noqa: PLC0415

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


if __name__ == "__main__":
    configure_django("django_celery_outbox", MONITORING_METRICS_ENABLED=False)
    quiet()
    run(prepare, drain)
