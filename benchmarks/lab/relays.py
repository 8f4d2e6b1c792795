"""Relays and consumers as they run in production: the management commands, in processes of their own."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from benchmarks.lab.arrivals import fresh_queue
from benchmarks.lab.database import rate
from benchmarks.lab.processes import Ended, Process, running
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record
from benchmarks.lab.verdicts import verdict
from benchmarks.lab.waiting import until, wait_for_end
from benchmarks.lab.workload import Keys

CONSUMER = [sys.executable, "manage.py", "inbox_consume"]
RELAY = [sys.executable, "manage.py", "outbox_relay"]
CONNECT_SECONDS = 60.0
SETTLE_DOWN_SECONDS = 0.5


def relaying(project: Project, relays: int = 1, **outbox: Any) -> AbstractContextManager[list[Process]]:
    """This number of relays, connected and idle, until the block ends."""
    return _workers(RELAY, project, relays, **outbox)


def consuming(project: Project, consumers: int = 1, *, concurrency: int = 0) -> AbstractContextManager[list[Process]]:
    """Processes with the handler of `benchmarks.shop`, each with this number of threads; 0 is the inbox's default."""
    return _workers([*CONSUMER, *(["--concurrency", str(concurrency)] if concurrency else [])], project, consumers)


def drain(project: Project, **outbox: Any) -> Ended:
    """One relay sends all ready messages and ends."""
    with running([*RELAY, "--drain"], project, ends=True, **outbox) as relay:
        return wait_for_end(relay, project)


def drain_preloaded(project: Project, record: Record, side: str, count: int, keys: Keys, *, first: int | None = None) -> float:
    """Fill an empty outbox, and drain it into an empty queue by one relay; messages per second, with `first` of the first ones.

    The verdict is recorded.
    """
    project.empty()
    producer_rate = project.database.preload(count, keys)
    fresh_queue(project)
    drain(project)
    capacity = rate(project.database.settled(), first=first)
    record.judge(verdict(project, side, count, producer_rate=producer_rate, capacity=capacity))
    return capacity


@contextmanager
def _workers(command: Sequence[str], project: Project, number: int, **outbox: Any) -> Iterator[list[Process]]:
    time.sleep(SETTLE_DOWN_SECONDS)  # connections that were just closed take a moment to be forgotten
    before = _connections(project)
    with ExitStack() as stack:
        processes = [stack.enter_context(running(command, project, **outbox)) for _ in range(number)]
        connected = f"{number} connections of {processes[0].name} to the broker"
        until(connected, lambda: _connections(project) >= before + number, *processes, seconds=CONNECT_SECONDS)
        time.sleep(SETTLE_DOWN_SECONDS)
        yield processes
        for process in processes:
            process.stop()


def _connections(project: Project) -> int:
    vhost = project.broker_url.rpartition("/")[2]
    return int(project.rabbit.evaluate(f'length(rabbit_connection_tracking:list(<<"{vhost}">>)).'))
