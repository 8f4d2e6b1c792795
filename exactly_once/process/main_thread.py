"""Run a command as a process: the main thread waits for signals, another thread does the work.

Python runs signal handlers on the main thread, between two bytecodes. A thread that waits in libpq for an unresponsive database
executes no bytecode. On the main thread such a wait would delay SIGTERM until the database answers. So the main thread waits
only for signals and for the end of the work, and ends the process when a stop takes too long.
"""

import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from math import inf
from typing import Any, TypeVar

from django.db import connections

from exactly_once.process.clock import awake, monotonic
from exactly_once.process.loop import StopRequest, end_process, running_until_signalled

Result = TypeVar("Result")

THREAD_NAME = "main-loop"
_LOOK_SECONDS = 0.2


def run_until_signalled(work: Callable[[StopRequest], Result], *, grace: timedelta) -> Result:
    """Run `work`; return its result or raise its exception. SIGTERM or SIGINT sets its stop request; it has `grace` to end.

    After `grace`, and at once on a second signal, the process ends. No message is lost: work in progress is an open transaction
    or an unacknowledged delivery.

    The calling thread does the work itself if no other thread could (see `is_private`), or if it is not the main thread,
    because Python delivers signals to the main thread only.
    """
    stop = StopRequest()
    is_main = threading.current_thread() is threading.main_thread()
    with running_until_signalled(stop):
        if not is_main or any(map(is_private, connections.all(initialized_only=True))):
            return work(stop)
        return _run_on_a_thread(work, stop, grace.total_seconds())


def _run_on_a_thread(work: Callable[[StopRequest], Result], stop: StopRequest, grace: float) -> Result:
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work(stop))
        except BaseException as error:  # noqa: BLE001 - it is raised on the main thread
            outcome.set_exception(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run, name=THREAD_NAME, daemon=True)
    thread.start()
    ends_at = inf
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
        if stop:
            ends_at = min(ends_at, awake() + grace)
        if awake() >= ends_at and thread.is_alive():
            end_process(f"it was asked to stop {grace:g} s ago and has not finished")
    return outcome.result()


@contextmanager
def beside(loops: Iterable[tuple[str, Callable[[], object]]], end: StopRequest, *, seconds: float) -> Iterator[None]:
    """Run loops, each with the name of its thread, beside the block; then set their `end`, and wait up to `seconds` for them.

    Bounded: an unresponsive database, or a slow receiver, must not delay the shutdown.
    """
    threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in loops]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        end_at = monotonic() + seconds
        for thread in threads:
            thread.join(max(end_at - monotonic(), 0))


def stack_of(thread: int | None) -> str:
    """What this thread executes now; "" if it has ended."""
    frame = sys._current_frames().get(thread or 0)  # noqa: SLF001 - documented, and the only way to a thread's stack
    return "".join(traceback.format_stack(frame)) if frame else ""


def is_private(connection: Any) -> bool:
    """Is its data visible to this thread only: in an open transaction, as in a test, or in an in-memory SQLite?"""
    return bool(connection.in_atomic_block) or (connection.vendor == "sqlite" and bool(connection.is_in_memory_db()))
