"""Start the real processes of the shop, and kill some of them.

A killed process gets SIGKILL: it runs no `finally`, rolls nothing back and does not disconnect from the broker. At the
end every process gets SIGTERM and must exit with 0.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from django.conf import settings

from demo_shop.banks.customer import REFUSED, SENT
from demo_shop.simulation.ledger import Deed, Ledger

END_WITHIN_SECONDS = 30
KILLED_NO_SOONER_THAN = 1.5
"""Seconds after its start: a process that is still importing handles nothing."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.5, 1.6
"""Seconds between two kills."""
TRANSFERS = "demo_transfers"
BEGINNINGS = (b"relay: sending the messages of ", b"receiving from ", b"running stored messages ", b"Transferring ")
"""The log line of a process that begins to work."""


@dataclass
class Worker:
    """One process slot; a killed process is followed by the next one in it."""

    name: str
    command: str
    log: Path
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    kills: int = 0
    _log_begins_at: int = 0

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._log_begins_at = log.tell()
            self.process = subprocess.Popen(  # noqa: S603 - our own manage.py with our own argument
                [sys.executable, "manage.py", self.command, *self.arguments], cwd=settings.BASE_DIR, stdout=log, stderr=log
            )
        self.started_at = time.monotonic()

    @property
    def exit_status(self) -> int | None:
        return self.process.poll() if self.process else None

    @property
    def has_begun(self) -> bool:
        """Whether SIGTERM ends it properly: before that, SIGTERM ends Python at once."""
        said = self.log.read_bytes()[self._log_begins_at :]
        return any(words in said for words in BEGINNINGS)


@dataclass
class Fleet:
    """The processes of one run.

    Attributes:
        bad_ends: processes that ended by themselves, or with an exit status other than 0.
    """

    ledger: Ledger
    directory: Path
    workers: Sequence[Worker]
    bad_ends: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        for worker in self.workers:
            worker.start()

    def mend(self) -> None:
        """Record and replace the processes that have ended by themselves."""
        with self._lock:
            for worker in self.workers:
                if worker.exit_status is not None:
                    self.bad_ends.append(f"{worker.name} ended by itself with {worker.exit_status}, see {worker.log}")
                    worker.start()

    def kill_some(self, kills: int, rng: random.Random, stop: threading.Event) -> None:
        """Kill so many, relays, consumers and customers of the banks in turn, at random moments, and start each again."""
        roles = sorted({worker.command for worker in self.workers}, reverse=True)
        while (killed := self.ledger.count(Deed.KILL)) < kills:
            role = roles[killed % len(roles)]
            worker = rng.choice([worker for worker in self.workers if worker.command == role])
            ready_in = max(0.0, worker.started_at + KILLED_NO_SOONER_THAN - time.monotonic())
            if stop.wait(ready_in + rng.uniform(SHORTEST_PAUSE, LONGEST_PAUSE)):
                return
            self._kill(worker)

    def results(self) -> dict[str, frozenset[str]]:
        """The transfers that were sent and refused, from the output of their customers."""
        lines = [
            line.partition(" ")
            for log in {worker.log for worker in self.workers if worker.command == TRANSFERS}
            for line in log.read_text().splitlines()
        ]
        return {word: frozenset(name for said, _, name in lines if said == word) for word in (SENT, REFUSED)}

    def end(self, command: str = "") -> None:
        """Send SIGTERM to all, or to those of one command, and check how they end."""
        with self._lock:
            self._wait_for_the_last_to_begin()
            running = [
                (worker, worker.process) for worker in self.workers if worker.process and command in {"", worker.command}
            ]
            for _, process in running:
                process.terminate()
            deadline = time.monotonic() + END_WITHIN_SECONDS
            for worker, process in running:
                worker.process = None
                try:
                    status = process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    self.bad_ends.append(f"{worker.name} did not end within {END_WITHIN_SECONDS} s of SIGTERM")
                    process.kill()
                    process.wait()
                else:
                    if status:
                        self.bad_ends.append(f"{worker.name} ended with {status} after SIGTERM, see {worker.log}")

    def _wait_for_the_last_to_begin(self) -> None:
        """The successor of a killed process may still be importing."""
        deadline = time.monotonic() + END_WITHIN_SECONDS
        while any(worker.process and worker.exit_status is None and not worker.has_begun for worker in self.workers):
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)

    def forget_logs(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def _kill(self, worker: Worker) -> None:
        with self._lock:
            if worker.process is None or worker.exit_status is not None:
                return
            pid = worker.process.pid
            worker.process.kill()
            worker.process.wait()
            worker.kills += 1
            worker.start()
            successor = worker.process.pid
        self.ledger.done(Deed.KILL)
        self.ledger.news.append(f"kill -9 {worker.name} (pid {pid}); its successor is pid {successor}")


@contextmanager
def running(ledger: Ledger, commands: Mapping[str, int]) -> Iterator[Fleet]:
    """This number of processes of each command and a customer of the banks; all are ended with the block."""
    directory = Path(tempfile.mkdtemp(prefix=f"demo-shop-{ledger.run}-"))
    workers = [
        Worker(
            name=f"{command} {number}", command=command, arguments=("--noreload",), log=directory / f"{command}-{number}.log"
        )
        for command, count in commands.items()
        for number in range(1, count + 1)
    ]
    workers.append(Worker(name=TRANSFERS, command=TRANSFERS, arguments=(ledger.run,), log=directory / f"{TRANSFERS}.log"))
    fleet = Fleet(ledger, directory, workers)
    fleet.start()
    try:
        yield fleet
    finally:
        for worker in workers:
            if worker.process is not None and worker.exit_status is None:
                worker.process.kill()
                worker.process.wait()
