"""Times publish() beside a history of so many days: `python -m benchmarks.actors.unique_publisher DAYS COUNT`.

It prints the milliseconds of a plain message, of a unique one, and of a unique one that was published before, each in a
transaction of its own and the median of COUNT. The earlier ones are in the history of today.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from typing import Any

import django


def main(days: int, count: int) -> None:
    django.setup()
    from django.db import connections, transaction  # noqa: PLC0415 - models are not ready before

    from exactly_once.sql.days import day_of  # noqa: PLC0415
    from outbox import publish  # noqa: PLC0415
    from outbox.models import OutboxMessage  # noqa: PLC0415
    from outbox.store.history import HISTORY  # noqa: PLC0415

    last = day_of("default")
    for ago in range(days):
        HISTORY.days.make("default", last - ago)

    def publish_one(name: str, **options: Any) -> float:
        began = time.perf_counter()
        with transaction.atomic():
            publish("bench.unique", {}, biz_id=name, **options)
        return 1000 * (time.perf_counter() - began)

    took: dict[str, list[float]] = {"plain": [], "new": [], "found": []}
    for number in range(-20, count):  # the first ones warm up
        # In turn, so that both have the same neighbours on the machine.
        plain, new = publish_one(f"plain-{number}"), publish_one(f"unique-{number}", unique=True)
        if number >= 0:
            took["plain"].append(plain)
            took["new"].append(new)
    OutboxMessage.objects.filter(is_unique=True).update(state="published", day=last)
    with connections["default"].cursor() as cursor:
        cursor.execute("VACUUM (ANALYZE)")
    took["found"] = [publish_one(f"unique-{number}", unique=True) for number in range(count)]
    sys.stdout.write(json.dumps({side: median(each) for side, each in took.items()}) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
