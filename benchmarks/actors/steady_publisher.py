"""Publish at a steady pace; print when each message's commit had been answered: [number, nanoseconds of the monotonic clock].

    python -m benchmarks.actors.steady_publisher COUNT PER_TRANSACTION SHORTEST LONGEST [TOPIC]

Between two transactions it waits from SHORTEST to LONGEST seconds, at random. It does not make up for lost time.
Every message is about a sale that is written in its transaction. With TOPIC, a message of that topic precedes each transaction.
"""

from __future__ import annotations

import json
import random
import sys
import time

import django
from django.db import transaction

from benchmarks.lab.workload import TOPIC, biz_id, many_customers, payload


def main() -> None:
    from benchmarks.shop.models import Sale  # noqa: PLC0415 - needs Django
    from outbox import Draft, publish, publish_many  # noqa: PLC0415

    count, per_transaction = int(sys.argv[1]), int(sys.argv[2])
    shortest, longest = float(sys.argv[3]), float(sys.argv[4])
    preceding = sys.argv[5:]
    committed: list[tuple[int, int]] = []
    due = time.monotonic()
    for first in range(0, count, per_transaction):
        for topic in preceding:
            with transaction.atomic():
                publish(topic, payload(first))
        numbers = range(first, min(first + per_transaction, count))
        with transaction.atomic():
            # Before publish() registers its own: the commit is answered, and the doorbell has not been rung yet.
            transaction.on_commit(lambda numbers=numbers: committed.extend((n, time.monotonic_ns()) for n in numbers))
            Sale.objects.bulk_create(Sale(number=number) for number in numbers)
            if per_transaction == 1:
                publish(TOPIC, payload(first), biz_id=biz_id(first), key=many_customers(first))
            else:
                publish_many(Draft(TOPIC, payload(n), biz_id=biz_id(n), key=many_customers(n)) for n in numbers)
        due = max(due + random.uniform(shortest, longest), time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
    print(json.dumps(committed))


if __name__ == "__main__":
    django.setup()
    main()
