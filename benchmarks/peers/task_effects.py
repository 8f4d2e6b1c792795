"""The task of the benchmark `tasks`: it inserts one row, in the transaction that its worker has, if any.

That of procrastinate is a coroutine on the worker's own pool, which is faster than a function in a thread.
"""

from __future__ import annotations

import os
from typing import Any

from django.conf import settings
from django.db import connection

INSERT = "INSERT INTO shop_effect (number, process) VALUES (%(number)s, %(process)s)"

if settings.SIDE == "procrastinate":
    from procrastinate.contrib.django import app

    @app.task(name="benchmarks.write_effect", pass_context=True)
    async def write_effect(context: Any, order: int, filler: str) -> None:
        await context.app.connector.execute_query_async(INSERT, number=order, process=os.getpid())

    enqueue = write_effect.defer
else:
    from django_tasks import task

    @task
    def write_effect(order: int, filler: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(INSERT, {"number": order, "process": os.getpid()})

    enqueue = write_effect.enqueue
