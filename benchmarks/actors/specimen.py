"""Publish one message, so that the benchmarks can see which columns `publish()` writes today."""

from __future__ import annotations

import django
from django.db import transaction

from benchmarks.lab.workload import TOPIC, biz_id, many_customers, payload


def main() -> None:
    from outbox import publish  # noqa: PLC0415 - its models need Django first

    with transaction.atomic():
        publish(TOPIC, payload(0), biz_id=biz_id(0), key=many_customers(0))


if __name__ == "__main__":
    django.setup()
    main()
