"""Publish many messages in one transaction, three times; print rows and seconds, from BEGIN to the answer to COMMIT.

python -m benchmarks.actors.publish_many DRAFTS
"""

from __future__ import annotations

import json
import sys
import time

import django
from django.db import transaction

from benchmarks.lab.workload import TOPIC, biz_id, many_customers, payload

TIMES = 3


def main() -> None:
    from outbox import Draft, publish_many  # noqa: PLC0415 - needs Django

    count = int(sys.argv[1])
    drafts = [Draft(TOPIC, payload(n), biz_id=biz_id(n), key=many_customers(n)) for n in range(count)]
    with transaction.atomic():  # connects, and imports what is imported late
        publish_many(drafts[:10])
    began = time.perf_counter()
    for _ in range(TIMES):
        with transaction.atomic():
            publish_many(drafts)
    print(json.dumps({"rows": count * TIMES, "seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    django.setup()
    main()
