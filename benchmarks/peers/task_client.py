"""The client of the benchmark `tasks`: it makes the tables, then enqueues as orders in lines of JSON say.

An order has the numbers `first` to `first + count - 1`, how many are enqueued in each transaction, together with a sale for
each, and the longest pause between two transactions. None in a transaction: in autocommit, and without sales. The answer is
how many seconds it took.
"""

from __future__ import annotations

import json
import random
import sys
import time
from contextlib import nullcontext

import django
from django.db import connection, transaction

from benchmarks.lab.workload import payload

TABLES = """
CREATE TABLE shop_sale (number bigint PRIMARY KEY);
CREATE TABLE shop_effect (id bigserial PRIMARY KEY, number bigint NOT NULL, process integer NOT NULL);
"""
SALE = "INSERT INTO shop_sale (number) VALUES (%s)"


def main() -> None:
    from benchmarks.peers.driving import migrate  # noqa: PLC0415 - needs Django
    from benchmarks.peers.task_effects import enqueue  # noqa: PLC0415

    migrate()
    with connection.cursor() as cursor:
        cursor.execute(TABLES)
        print(json.dumps("ready"), flush=True)
        for order in map(json.loads, sys.stdin):
            first, count, together = order["first"], order["count"], order["together"]
            began = time.perf_counter()
            for start in range(first, first + count, together or 1):
                with transaction.atomic() if together else nullcontext():
                    for number in range(start, start + (together or 1)):
                        if together:
                            cursor.execute(SALE, [number])
                        enqueue(**payload(number))
                    if together > 1:
                        cursor.execute("ANALYZE")  # for the plans of the workers
                if order["pause"]:
                    time.sleep(random.uniform(order["pause"] / 2, order["pause"]))
            print(json.dumps(time.perf_counter() - began), flush=True)


if __name__ == "__main__":
    django.setup()
    main()
