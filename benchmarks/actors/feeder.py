"""feeder KIND: publish the requested number of messages, each time in one transaction, numbered from 0.

It reads lines of JSON, `{"messages": 500}`, until its standard input ends.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import django
from django.db import transaction

from benchmarks.lab.workload import TOPIC, biz_id, many_customers, payload

DELAY = timedelta(milliseconds=200)


def _options(kind: str, number: int) -> dict[str, Any]:
    if kind == "prioritised":
        return {"priority": 1 + number % 9}
    if kind == "delayed":
        return {"delay": DELAY}
    return {"key": many_customers(number)}


def main() -> None:
    from outbox import Draft, publish_many  # noqa: PLC0415 - needs Django

    kind, published = sys.argv[1], 0
    for line in sys.stdin:
        numbers = range(published, published + json.loads(line)["messages"])
        with transaction.atomic():
            publish_many(Draft(TOPIC, payload(n), biz_id=biz_id(n), **_options(kind, n)) for n in numbers)
        published = numbers.stop


if __name__ == "__main__":
    django.setup()
    main()
