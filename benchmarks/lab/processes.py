"""Processes of a benchmark: started, talked to, watched and always ended."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.lab.project import ROOT, Project
from tests.support.servers import watcher

STOP_SECONDS = 60.0
LOG_TAIL = 2000
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class ProcessFailed(Exception):
    """A process of a benchmark did not do what it was started for; the message ends with what it said."""


@dataclass(frozen=True)
class Ended:
    """The resources that an ended process has used, by the kernel.

    Attributes:
        cpu_seconds: user and system time, from the first instruction to the last.
        most_memory: largest resident set, bytes.
    """

    cpu_seconds: float
    most_memory: int


class Process:
    """A process that answers in lines of JSON, if at all, and logs to its standard error.

    Args:
        ends: it ends by itself when its work is done. Without this an end before it is stopped is a failure.
    """

    def __init__(self, command: Sequence[str], environ: dict[str, str], *, ends: bool = False) -> None:
        self.name = " ".join(command[1:])
        self._ends = ends
        self._ended: Ended | None = None
        self._answers_read = 0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - both live as long as the process
        self._answers = tempfile.TemporaryFile()  # noqa: SIM115
        self._popen = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=self._answers, stderr=self._log
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def memory(self) -> int:
        """Resident bytes now; 0 when it has ended."""
        with suppress(OSError, IndexError):
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()
        return 0

    def order(self, **words: Any) -> None:
        """Send it the next request, as a line of JSON."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(words).encode() + b"\n")
        self._popen.stdin.flush()

    def answer(self, seconds: float = STOP_SECONDS) -> Any:
        """The next line it answers, decoded; waited for."""
        deadline = time.monotonic() + seconds
        while (answers := _content(self._answers)).count(b"\n") <= self._answers_read:
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{self.name} has not answered for {seconds:.0f} s:\n{self.said()}")
            if self._has_ended() and _content(self._answers) == answers:
                raise ProcessFailed(f"{self.name} ended with {self._popen.returncode} and no answer:\n{self.said()}")
            time.sleep(0.002)
        line = answers.splitlines()[self._answers_read]
        self._answers_read += 1
        return json.loads(line)

    def said(self) -> str:
        return _content(self._log).decode(errors="replace")[-LOG_TAIL:]

    def check(self) -> None:
        """
        Raises:
            ProcessFailed: it has ended with a failure, or has ended at all and is not one that ends by itself.
        """
        if self._has_ended() and (self._popen.returncode or not self._ends):
            raise ProcessFailed(f"{self.name} ended with {self._popen.returncode}:\n{self.said()}")

    def ended(self) -> Ended | None:
        """The resources that it has used; None while it runs.

        Raises:
            ProcessFailed: it has ended with a failure.
        """
        if self._has_ended() and self._popen.returncode:
            raise ProcessFailed(f"{self.name} ended with {self._popen.returncode}:\n{self.said()}")
        return self._ended

    def finish(self, seconds: float = STOP_SECONDS) -> Ended:
        """Wait for the end of a process without remaining work; `waiting.wait_for_end` waits for a working one."""
        deadline = time.monotonic() + seconds
        while (ended := self.ended()) is None:
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{self.name} did not end within {seconds:.0f} s:\n{self.said()}")
            time.sleep(0.005)
        return ended

    def stop(self) -> Ended:
        self._popen.terminate()
        return self.finish()

    def _has_ended(self) -> bool:
        if self._ended is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self._popen.returncode = os.waitstatus_to_exitcode(status)
                self._ended = Ended(cpu_seconds=usage.ru_utime + usage.ru_stime, most_memory=usage.ru_maxrss * 1024)
        return self._ended is not None

    def close(self) -> None:
        """Ended, in whatever state it is."""
        if self._popen.returncode is None:
            self._popen.kill()
            self._popen.wait()
        for file in (self._popen.stdin, self._answers, self._log):
            if file is not None:
                with suppress(BrokenPipeError):
                    file.close()


def _content(file: IO[bytes]) -> bytes:
    """All that was written, without moving the offset at which the other process writes on."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)


@contextmanager
def running(command: Sequence[str], project: Project, *, ends: bool = False, **outbox: Any) -> Iterator[Process]:
    """A process of the project, killed at the end of the block if it still runs; see `Process` for `ends`."""
    process = Process(command, project.environ(**outbox), ends=ends)
    try:
        yield process
    finally:
        process.close()


@contextmanager
def memory_of(process: Process, every: float = 0.25) -> Iterator[list[tuple[float, int]]]:
    """Samples of (seconds since the start, resident bytes), taken while the block runs."""
    samples: list[tuple[float, int]] = []
    done = threading.Event()
    began = time.monotonic()

    def sample() -> None:
        while not done.wait(every):
            if memory := process.memory:
                samples.append((time.monotonic() - began, memory))

    sampler = threading.Thread(target=sample, name="memory", daemon=True)
    sampler.start()
    try:
        yield samples
    finally:
        done.set()
        sampler.join()


def cpu_seconds_of_tree(pid: int) -> float:
    """User and system time of a server: of its processes, and of those of them that have ended."""
    ticks = 0
    for member in (pid, *watcher.descendants(pid)):
        with suppress(OSError):
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            own_and_children = slice(11, 15) if member == pid else slice(11, 13)
            ticks += sum(map(int, fields[own_and_children]))
    return ticks / TICKS_PER_SECOND
