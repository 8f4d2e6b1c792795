"""procrastinate: no broker, so its worker runs a job that does nothing where the others publish."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import procrastinate
import psycopg

from benchmarks.lab.workload import payload
from benchmarks.peers.driving import run

app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=os.environ["DATABASE_URL"]))

OUTCOME = """
SELECT count(*) FILTER (WHERE type = 'started'), count(*) FILTER (WHERE type = 'succeeded'),
       count(DISTINCT job_id) FILTER (WHERE type = 'succeeded'),
       extract(epoch FROM max(at) FILTER (WHERE type = 'succeeded') - min(at) FILTER (WHERE type = 'succeeded'))::float8
FROM procrastinate_events
"""


@app.task(name="benchmarks.nothing")
async def nothing(message: dict[str, Any]) -> None:
    pass


def prepare(count: int) -> list[list[Any]]:
    with app.open():
        app.schema_manager.apply_schema()
        nothing.batch_defer(*({"message": payload(number)} for number in range(count)))
    return [[number + 1, number] for number in range(count)]


def drain(count: int, concurrency: int) -> dict[str, Any]:
    asyncio.run(work(concurrency))
    with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
        started, succeeded, jobs, seconds = connection.execute(OUTCOME).fetchone()
    faults = "" if started == succeeded == jobs == count else f"{started} started, {succeeded} succeeded of {count}"
    return {"messages": succeeded - 1, "seconds": seconds, "faults": faults}


async def work(concurrency: int) -> None:
    async with app.open_async():
        await app.run_worker_async(wait=False, concurrency=concurrency, listen_notify=False, install_signal_handlers=False)


if __name__ == "__main__":
    run(prepare, drain)
