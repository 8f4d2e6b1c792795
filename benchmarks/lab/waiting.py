"""Wait for the processes of a benchmark, and fail as soon as the awaited result is impossible.

A wait has no time limit as long as it makes progress. It fails when a process has ended, when there was no progress for
`STALLED_SECONDS`, and after `LOOK_SECONDS` without progress when no work is left that could make any. The error reports what
was awaited, how far it came, and the counts of the database, the broker and the handlers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from benchmarks.lab.account import account
from benchmarks.lab.processes import Ended, Process, ProcessFailed
from benchmarks.lab.project import Project

STALLED_SECONDS = 30.0
"""Longer than a process takes to start on a loaded machine."""
LOOK_SECONDS = 5.0
"""Between two looks at what costs more than the number that is awaited; a wait that makes progress takes none."""
TICK_SECONDS = 0.005


class Stalled(Exception):
    """A benchmark waited in vain. The first line of the message says for what, and what was counted instead."""

    def __init__(self, what: str, project: Project, *processes: Process) -> None:
        super().__init__(f"{what}: {_account(project)}{_logs(*processes)}")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a project towards the awaited result.

    Attributes:
        what: is awaited, as in "5,000 effects".
        goal: how many.
        current: how many there are now; asked all the time, so it must be cheap.
        work_left: what can still become one of them: unfinished rows and messages. None: unknown.
    """

    project: Project
    what: str
    goal: int
    current: Callable[[], int]
    work_left: Callable[[], int] | None = None

    @property
    def reached(self) -> bool:
        return self.current() >= self.goal

    def __str__(self) -> str:
        return f"{self.current():,} of {self.goal:,} {self.what}"


class StallDetector:
    """Detects that a value has stopped changing.

    Args:
        clock: seconds.
        limit: how long it may stay unchanged.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, limit: float = STALLED_SECONDS) -> None:
        self._clock = clock
        self._limit = limit
        self._seen: Hashable = None
        self._since = self._looked_at = clock()

    def stalled(self, now_seen: Hashable) -> bool:
        """Has it been unchanged for the limit?"""
        now = self._clock()
        if now_seen != self._seen:
            self._seen = now_seen
            self._since = self._looked_at = now
        return now - self._since >= self._limit

    def look_due(self) -> bool:
        """Is it time to find out why nothing changes? True once in `LOOK_SECONDS`, counted from the last change."""
        now = self._clock()
        if now - self._looked_at < LOOK_SECONDS:
            return False
        self._looked_at = now
        return True


class ProgressWatch:
    """Fails the wait for one `Progress`; `check` is called again and again while it is not reached."""

    def __init__(self, progress: Progress, *processes: Process) -> None:
        self._progress = progress
        self._processes = processes
        self._detector = StallDetector()

    def check(self) -> None:
        """
        Raises:
            ProcessFailed: one of the processes has ended.
            Stalled: the count does not change any more.
        """
        progress = self._progress
        for process in self._processes:
            try:
                process.check()
            except ProcessFailed as error:
                raise ProcessFailed(f"{progress}, and then {error}") from error
        if self._detector.stalled(progress.current()):
            self._fail(f"and no more for {STALLED_SECONDS:.0f} s")
        if progress.work_left is not None and self._detector.look_due() and not progress.work_left() and not progress.reached:
            self._fail("and nothing is left that could become more")

    def _fail(self, why: str) -> None:
        raise Stalled(f"{self._progress} {why}", self._progress.project, *self._processes)


def wait_for(progress: Progress, *processes: Process, every: float = 0.05) -> None:
    """Wait until the goal is reached.

    Raises:
        ProcessFailed: one of the processes has ended before.
        Stalled: the count does not change any more.
    """
    watch = ProgressWatch(progress, *processes)
    while not progress.reached:
        watch.check()
        time.sleep(every)


def wait_for_end(process: Process, project: Project, *others: Process) -> Ended:
    """Wait until a process that ends by itself has done so.

    Raises:
        ProcessFailed: it has failed, or one of the others has ended.
        Stalled: the project makes no progress any more, and the process still runs.
    """
    detector = StallDetector()
    while (ended := process.ended()) is None:
        for other in others:
            other.check()
        if detector.look_due() and detector.stalled(_movement(project)):
            why = f"{process.name} has not ended, and nothing has moved for {STALLED_SECONDS:.0f} s"
            raise Stalled(why, project, process, *others)
        time.sleep(TICK_SECONDS)
    return ended


def until(what: str, condition: Callable[[], bool], *processes: Process, seconds: float, every: float = 0.05) -> None:
    """Wait for something that takes a moment and cannot be counted.

    Raises:
        ProcessFailed: one of the processes has ended, or the time is over.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        for process in processes:
            process.check()
        if time.monotonic() > deadline:
            raise ProcessFailed(f"waited {seconds:.0f} s in vain for this: {what}{_logs(*processes)}")
        time.sleep(every)


def _movement(project: Project) -> Hashable:
    """Changes whenever a row is inserted or a message arrives or leaves; the queries of a waiting process do not change it."""
    return project.database.numbers_drawn(), tuple(sorted(project.queue_lengths().items()))


def _account(project: Project) -> str:
    """What a server has lost may be the reason why nothing moves: an account that fails must not hide it."""
    try:
        return account(project)
    except Exception as error:  # noqa: BLE001 - whatever it is, the message reports it
        return f"no account, because of {type(error).__name__}: {error}"


def _logs(*processes: Process) -> str:
    return "".join(f"\n--- {process.name} said:\n{process.said()}" for process in processes)
