"""Counts duplicates of old messages on many threads: `python -m benchmarks.actors.old_duplicates DAYS DUPLICATES THREADS`."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import django


def main(days: int, duplicates: int, threads: int) -> None:
    django.setup()
    from django.db import connections  # noqa: PLC0415 - models are not ready before

    from exactly_once.sql.days import day_of  # noqa: PLC0415
    from exactly_once.sql.now import DatabaseTime  # noqa: PLC0415
    from inbox.housekeeping import HISTORY  # noqa: PLC0415
    from inbox.states import State  # noqa: PLC0415
    from inbox.store import receipts  # noqa: PLC0415
    from inbox.store.duplicates import count_duplicate  # noqa: PLC0415
    from inbox.store.message_rows import NewRow  # noqa: PLC0415

    rows, last = [], day_of("default")
    for ago in range(days):
        HISTORY.days.make("default", last - ago)
        at = DatabaseTime(-timedelta(days=ago))
        names = {"handler": "bench", "topic": "bench.old", "biz_id": str(ago), "message_id": str(ago), "digest": "d"}
        columns = {"body": b"{}", "state": State.DONE, "settled_at": at, "received_at": at, "day": last - ago}
        receipts.create("default", **names, **columns)
        rows.append(NewRow(**names, body=b"{}", content_type="application/json"))
    errors: list[str] = []

    def count(number: int) -> None:
        try:
            while count_duplicate("default", rows[number % days]) is None:
                pass
        except Exception as error:  # noqa: BLE001 - counted
            errors.append(str(error))

    began = time.perf_counter()
    with ThreadPoolExecutor(threads, initializer=connections["default"].ensure_connection) as pool:
        list(pool.map(count, range(duplicates)))
    seconds = time.perf_counter() - began
    sys.stdout.write(json.dumps({"rate": duplicates / seconds, "errors": len(errors), "error": errors[:1]}) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
