"""Run the collected tests in several processes: `--workers 4`.

The tests are collected once, in a process that has no database. Each worker is forked from it, asks it for one test after
another, and sends it the reports. A worker that dies fails the test that it was running, and is replaced.

pytest-xdist starts an interpreter for each worker, which imports and collects everything again: 13 s of processor time each.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from multiprocessing.connection import Pipe, wait
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tests import databases, tiers
from tests.support.servers import RabbitServer, ServerFailed, ServerUnavailable, private

rabbitmq = pytest.StashKey[RabbitServer]()
"""The server that all workers share."""

NEED_RABBITMQ = {"rabbitmq_server", "shared_rabbitmq", "broker"}
CHUNK = 10
"""How many tests of one module a worker gets at once: they may share fixtures."""

FIXTURES_SECONDS = 300
"""How much longer than its own timeout a test may take with its fixtures: that timeout cannot interrupt a finaliser."""

END_SECONDS = 60


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run the tests in N forked processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not session.config.option.workers or session.config.option.collectonly:
        return None
    if session.config.option.usepdb:
        raise pytest.UsageError("--pdb does not work with --workers.")
    if session.testsfailed and not session.config.option.continue_on_collection_errors:
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    _Run(session).run(session.config.option.workers)
    return True


class _Run:
    """The tests that are left for each database, as indices of the session's items, and the workers that run them."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._left = {
            engine: deque(_chunks([(n, item) for n, item in enumerate(session.items) if databases.runs_on(engine, item)]))
            for engine in databases.engines(session.config)
        }
        self._workers: dict[Any, _Worker] = {}
        session.testscollected = sum(len(chunk) for chunks in self._left.values() for chunk in chunks)

    def run(self, count: int) -> None:
        try:
            self._start_workers(count)
            while self._workers:
                for channel in wait(list(self._workers), timeout=1):
                    self._hear(self._workers[channel])
                self._end_those_that_hang()
                if self._session.shouldfail or self._session.shouldstop:
                    self._left = {engine: deque() for engine in self._left}
                    for worker in self._workers.values():
                        worker.chunk.clear()
        finally:
            self._end_all()
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _end_those_that_hang(self) -> None:
        for worker in list(self._workers.values()):
            if worker.channel.poll():
                continue
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid:  # a process that it has forked may hold its end of the channel open
                self._has_ended(worker, status)
            elif worker.unfinished and worker.silent_seconds > self._limit_of(worker.unfinished[0]):
                os.kill(worker.pid, signal.SIGABRT)  # the handler of faulthandler prints the stacks

    def _limit_of(self, index: int) -> float:
        return FIXTURES_SECONDS + _timeout(self._session.items[index])

    def _end_all(self) -> None:
        """Without their channels, workers end after the test that they run."""
        for worker in self._workers.values():
            worker.channel.close()
        deadline = time.monotonic() + END_SECONDS
        for worker in self._workers.values():
            while os.waitpid(worker.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(worker.pid, signal.SIGKILL)
                time.sleep(0.05)

    def _start_workers(self, count: int) -> None:
        if any(NEED_RABBITMQ & tiers.fixtures(item) for item in self._session.items):
            # Without it, the tests that need one say what is missing.
            with contextlib.suppress(ServerUnavailable, ServerFailed):
                self._session.config.stash[rabbitmq] = RabbitServer(spins=False).start(waits=False)
        first, *others = self._left
        # One worker for each other database: when it has run all tests, one for the first takes its place.
        for engine in (*others, *[first] * count)[:count]:
            self._start(engine)

    def _start(self, engine: databases.Engine) -> None:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            for channel in (ours, *self._workers):
                channel.close()
            _work(self._session, engine, theirs)
        theirs.close()
        self._workers[ours] = _Worker(ours, pid, engine)

    def _hear(self, worker: _Worker) -> None:
        try:
            reports = worker.channel.recv()
        except (EOFError, ConnectionError):
            reports = None
        if reports is None:  # outside of the handler, whose error a new worker would inherit
            self._has_ended(worker, os.waitpid(worker.pid, 0)[1])
            return
        hook, config = self._session.config.hook, self._session.config
        for report in reports:
            if report is None:
                self._left[worker.engine].appendleft([*worker.unfinished, *worker.chunk])
                worker.unfinished.clear()
                worker.chunk.clear()
                worker.is_leaving = True
                break
            if isinstance(report, dict):
                report = hook.pytest_report_from_serializable(config=config, data=report)  # noqa: PLW2901
            if report.when == "teardown":
                worker.unfinished.popleft()
            self._report(worker, report)
        with contextlib.suppress(ConnectionError):  # the next turn finds that it has ended
            if not worker.is_leaving:
                worker.give(self._left[worker.engine])

    def _has_ended(self, worker: _Worker, status: int) -> None:
        del self._workers[worker.channel]
        worker.channel.close()
        if status and not worker.unfinished:
            self._session.shouldstop = f"a worker ended with status {os.waitstatus_to_exitcode(status)} outside of any test"
        if worker.unfinished:
            item = self._session.items[worker.unfinished.popleft()]
            text = f"The worker ended with status {os.waitstatus_to_exitcode(status)} while it ran this test."
            self._report(worker, pytest.TestReport(item.nodeid, item.location, {item.name: 1}, "failed", text, "call"))
        if unfinished := [*worker.unfinished, *worker.chunk]:
            self._left[worker.engine].appendleft(unfinished)
        engine = next((engine for engine in (worker.engine, *self._left) if self._left[engine]), None)
        if engine and not (self._session.shouldfail or self._session.shouldstop):
            self._start(engine)

    def _report(self, worker: _Worker, report: pytest.TestReport) -> None:
        if worker.engine != next(iter(self._left)):
            report.nodeid += f" ({worker.engine})"
        # As pytest-xdist does, for the terminal: tests overlap.
        report.node = SimpleNamespace(  # type: ignore[attr-defined]
            gateway=SimpleNamespace(id=worker.pid), _workerinfocache=f"[worker {worker.pid}]"
        )
        self._session.config.hook.pytest_runtest_logreport(report=report)


class _Worker:
    """A worker, as the process that distributes the tests sees it."""

    def __init__(self, channel: Any, pid: int, engine: databases.Engine) -> None:
        self.channel = channel
        self.pid = pid
        self.engine = engine
        self.unfinished: deque[int] = deque()
        self.chunk: deque[int] = deque()
        self.is_leaving = False
        self._heard_at = time.monotonic()

    def give(self, chunks: deque[list[int]]) -> None:
        """Send it its next test, or `None` at the end."""
        self._heard_at = time.monotonic()
        if not self.chunk and chunks:
            self.chunk.extend(chunks.popleft())
        index = self.chunk.popleft() if self.chunk else None
        self.is_leaving = index is None
        if index is not None:
            self.unfinished.append(index)
        self.channel.send(index)

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self._heard_at


def _chunks(tests: list[tuple[int, pytest.Item]]) -> Iterator[list[int]]:
    """Long tests first: those that share a server as one chunk, then each other one alone, by its timeout."""
    kinds: dict[str, list[tuple[int, pytest.Item]]] = {"long": [], "short": []}
    shared: dict[object, list[int]] = {}
    for index, item in tests:
        if "mortal_rabbitmq" in tiers.fixtures(item):
            shared.setdefault("mortal_rabbitmq", []).append(index)
        elif tiers.is_core(item):
            kinds["short"].append((index, item))
        elif _has_a_fixture_of_its_module(item):
            shared.setdefault(item.path, []).append(index)
        else:
            kinds["long"].append((index, item))
    yield from sorted(shared.values(), key=len, reverse=True)
    yield from ([index] for index, _ in sorted(kinds["long"], key=lambda test: -_timeout(test[1])))
    for _, module in groupby(kinds["short"], key=lambda test: test[1].path):
        indices = [index for index, _ in module]
        yield from (indices[start : start + CHUNK] for start in range(0, len(indices), CHUNK))


def _has_a_fixture_of_its_module(item: pytest.Item) -> bool:
    """Such as a server, which each worker that runs one of these tests would start for itself."""
    known = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    return any(definitions[-1].scope == "module" for definitions in known.values())


def _timeout(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0] if mark else item.config.getini("timeout"))


def _work(session: pytest.Session, engine: databases.Engine, channel: Any) -> NoReturn:
    """Run tests in a forked process, until there are none."""
    status = 1
    try:
        results = _become_a_worker(session.config, engine, channel)
        with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
            _run_tests(session, results)
            status = 0
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        try:
            atexit._run_exitfuncs()
        finally:
            os._exit(status)


def _run_tests(session: pytest.Session, results: _Results) -> None:
    index = results.exchange()
    while index is not None and not results.has_timed_out:
        following = results.exchange()
        item, next_item = session.items[index], None if following is None else session.items[following]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
        index = following
    results.send(leaves=index is not None)


def _become_a_worker(config: Any, engine: databases.Engine, channel: Any) -> _Results:
    """Replace what belongs to the parent: random numbers, servers, files and the terminal."""
    config.option.maxfail = 0  # the parent counts
    random.seed()
    private.own_what_follows()
    databases.switch_to(engine, config)
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    directories = config._tmp_path_factory
    directories._basetemp = directories.getbasetemp() / str(os.getpid())
    directories._basetemp.mkdir()
    terminal = config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(SimpleNamespace(_tw=terminal._tw), "terminalreporter")  # what a timeout writes to
    results = _Results(config, channel)
    config.pluginmanager.register(results)
    return results


class _Results:
    """The reports of a worker that are not sent yet."""

    def __init__(self, config: pytest.Config, channel: Any) -> None:
        self._config = config
        self._channel = channel
        self._reports: list[Any] = []
        self.has_timed_out = False
        """A timeout interrupts whatever runs, such as a statement: what the process has open is not to be used again."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.has_timed_out |= report.failed and "from pytest-timeout" in report.longreprtext
        if report.passed:  # pickling it takes less time than the general form, and its output is not shown
            report.sections = []
            self._reports.append(report)
        else:
            self._reports.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def exchange(self) -> int | None:
        """Send the reports, and receive the index of the next test, if there is one."""
        self.send()
        index: int | None = self._channel.recv()
        return index

    def send(self, *, leaves: bool = False) -> None:
        """Send the reports; `leaves` if no test is run any more although one was received."""
        self._channel.send([*self._reports, *([None] if leaves else [])])
        self._reports = []
