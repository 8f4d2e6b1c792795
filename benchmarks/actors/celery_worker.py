"""The app of a Celery worker's process: `celery -A benchmarks.actors.celery_worker worker`.

    python -m benchmarks.actors.celery_worker TASK COUNT

sends so many calls of that task of `benchmarks.shop.tasks` to the worker's queue.
"""

from __future__ import annotations

import os
import sys

import django
from celery import Celery

from benchmarks.lab.workload import payload

django.setup()

app = Celery("benchmarks", broker=os.environ["BROKER_URL"])
app.conf.update(broker_transport_options={"confirm_publish": True}, worker_hijack_root_logger=False)
app.conf["CELERY_DB_REUSE_MAX"] = sys.maxsize
app.autodiscover_tasks(["benchmarks.shop"], force=True)


def main() -> None:
    task = app.tasks[f"benchmarks.shop.tasks.{sys.argv[1]}"]
    with app.producer_or_acquire() as producer:
        for number in range(int(sys.argv[2])):
            task.apply_async(kwargs=payload(number), producer=producer)


if __name__ == "__main__":
    main()
