"""Publish messages with a delay of one to two seconds at a steady pace, from a given instant on; print how many.

    python -m benchmarks.actors.delaying_publisher FIRST COUNT PER_SECOND BEGIN

BEGIN is in seconds of the system's clock, which the database has, too. It does not make up for lost time.
"""

from __future__ import annotations

import json
import random
import sys
import time
from datetime import timedelta

import django
from django.db import transaction

from benchmarks.lab.workload import biz_id, many_topics, payload

PER_TRANSACTION = 5
SHORTEST_SECONDS, LONGEST_SECONDS = 1.0, 2.0


def main() -> None:
    from outbox import publish  # noqa: PLC0415 - its models need Django first

    first, count = int(sys.argv[1]), int(sys.argv[2])
    per_second, begin = float(sys.argv[3]), float(sys.argv[4])
    due = time.monotonic() + max(0.0, begin - time.time())
    for head in range(first, first + count, PER_TRANSACTION):
        time.sleep(max(0.0, due - time.monotonic()))
        with transaction.atomic():
            for number in range(head, min(head + PER_TRANSACTION, first + count)):
                delay = timedelta(seconds=random.uniform(SHORTEST_SECONDS, LONGEST_SECONDS))
                publish(many_topics(number), payload(number), biz_id=biz_id(number), delay=delay)
        due = max(due + PER_TRANSACTION / per_second, time.monotonic())
    print(json.dumps(count))


if __name__ == "__main__":
    django.setup()
    main()
