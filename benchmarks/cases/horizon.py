"""Does the relay keep its pace while a forgotten transaction keeps every dead row of the whole run from being vacuumed?

A REPEATABLE READ transaction is open from before the first message to after the last. A producer keeps a few thousand messages
waiting, so that the relay works near its capacity under the same load throughout, and a consumer takes what arrives.
The messages are ordered ones of many keys, then prioritised ones, then delayed ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from benchmarks.lab.actors import acting
from benchmarks.lab.arrivals import Arrivals, at_consumer, consume_until, fresh_queue
from benchmarks.lab.database import LIVE
from benchmarks.lab.plan import Plan, say
from benchmarks.lab.processes import Process
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record
from benchmarks.lab.relays import relaying
from benchmarks.lab.servers import Lab
from benchmarks.lab.verdicts import verdict
from benchmarks.lab.waiting import StallDetector, Stalled, wait_for

KINDS = ("ordered", "prioritised", "delayed")
PER_TRANSACTION = 500
UNDER_WAY = 6_000
"""Messages between the producer and the consumer, most of them waiting for the relay."""
WARM_UP_SECONDS = 5.0
PAUSE_SECONDS = 0.005

Sample = tuple[float, int]
"""Seconds since the start, messages arrived."""


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    seconds = plan.choose(full=60 * plan.minutes, quick=12.0)
    for kind in KINDS:
        _measure(lab, kind, seconds, record)
    record.note(f"{seconds:.0f} s after {WARM_UP_SECONDS:.0f} s of warming up for each kind; a minute is at most a quarter.")
    record.note("The producer keeps step with the relay. Everything shares the machine: compare the minutes, not the rates.")


def _measure(lab: Lab, kind: str, seconds: float, record: Record) -> None:
    window = min(60.0, seconds / 4)
    project = lab.new_project()
    project.empty()
    fresh_queue(project)
    say(f"{record.name}: {seconds:.0f} s under a pinned horizon, {kind} messages")
    arrivals = Arrivals()
    with (
        _pinned(project),
        relaying(project) as relays,
        acting(project, "feeder", kind) as feeder,
        _consuming(project, arrivals) as reader,
    ):
        samples, ordered = _keep_busy(project, arrivals, reader, feeder, relays, WARM_UP_SECONDS + seconds)
        wait_for(at_consumer(project, arrivals, ordered), *relays, feeder)
        record.add(f"{kind}: dead rows at the end", float(_dead(project)), "rows")
    first, last = f"{kind}: first minute", f"{kind}: last minute"
    record.add(first, _rate_between(samples, WARM_UP_SECONDS, WARM_UP_SECONDS + window), "msg/s")
    record.add(last, _rate_between(samples, samples[-1][0] - window, samples[-1][0]), "msg/s")
    record.compare(last, first, reach=">= 0.90")
    record.details[f"{kind}: arrived_by_second"] = samples
    rate = _rate_between(samples, WARM_UP_SECONDS, samples[-1][0])
    record.judge(verdict(project, "outbox_relay", ordered, arrivals=arrivals, producer_rate=rate, capacity=rate))


@contextmanager
def _pinned(project: Project) -> Iterator[None]:
    with psycopg.connect(project.database.url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT 1")
        yield


@contextmanager
def _consuming(project: Project, arrivals: Arrivals) -> Iterator[threading.Thread]:
    done = threading.Event()
    reader = threading.Thread(
        target=consume_until, args=[project, arrivals.take], kwargs={"until": done.is_set}, name="consumer", daemon=True
    )
    reader.start()
    try:
        yield reader
    finally:
        done.set()
        reader.join()


def _keep_busy(
    project: Project, arrivals: Arrivals, reader: threading.Thread, feeder: Process, relays: list[Process], seconds: float
) -> tuple[list[Sample], int]:
    """Samples by second, and how many messages the feeder was asked to publish."""
    samples: list[Sample] = [(0.0, arrivals.taken)]
    detector = StallDetector()
    ordered = 0
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        while ordered - arrivals.taken < UNDER_WAY:
            feeder.order(messages=PER_TRANSACTION)
            ordered += PER_TRANSACTION
        if passed - samples[-1][0] >= 1.0:
            samples.append((passed, arrivals.taken))
            for process in (*relays, feeder):
                process.check()
            if not reader.is_alive() or detector.stalled(arrivals.taken):
                what = f"{arrivals.taken:,} of {ordered:,} messages at the consumer, and no more"
                raise Stalled(what, project, *relays, feeder)
        time.sleep(PAUSE_SECONDS)
    samples.append((passed, arrivals.taken))
    return samples, ordered


def _rate_between(samples: list[Sample], start: float, end: float) -> float:
    within = [sample for sample in samples if start <= sample[0] <= end]
    (first_at, first), (last_at, last) = within[0], within[-1]
    return (last - first) / (last_at - first_at)


def _dead(project: Project) -> int:
    query = "SELECT n_dead_tup FROM pg_stat_user_tables WHERE relid = %s::regclass"
    return int(project.database.value(query, LIVE.as_string(None)))
