"""Ends the servers of a process that died.

Run as a script, it reads orders from its standard input (one JSON object a line) until the owner has ended: by the end of
the pipe, or by having a new parent when a forked child of the owner still holds the pipe. Then it ends every process it
was given, with its descendants, and removes every directory it was given.

Standard library only, and nothing of this package: it runs isolated, with any working directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

LOOK_EVERY_SECONDS = 0.5
GRACE_SECONDS = 5.0
KILL_SECONDS = 60.0


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`. PostgreSQL's backends lead sessions of their own, so a group is not enough."""
    children = defaultdict(list)
    for child, parent in _parents():
        children[parent].append(child)
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def kill_tree(pid: int) -> None:
    """SIGKILL for `pid` and everything below it, stopped first so that it cannot react to the death of its children.

    It returns when all have ended. A descendant that survived, because it was forked while `pid` was being stopped, would keep
    the port and the shared memory of a server, and its next start would fail. A process that waits for the disk ends later.
    """
    send(pid, signal.SIGSTOP)
    deadline = time.monotonic() + KILL_SECONDS
    while is_alive(pid) and _state(pid) not in {"T", "t"} and time.monotonic() < deadline:
        time.sleep(0.001)
    family = [pid, *descendants(pid)]
    for member in family:
        send(member, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    while any(is_alive(member) for member in family) and time.monotonic() < deadline:
        time.sleep(0.01)


def end_tree(pid: int, ask_with: int, grace_seconds: float = GRACE_SECONDS) -> None:
    """Ask `pid` to end, wait for it, and kill the remaining descendants."""
    family = [pid, *descendants(pid)]
    send(pid, ask_with)
    deadline = time.monotonic() + grace_seconds
    while any(is_alive(member) for member in family) and time.monotonic() < deadline:
        time.sleep(0.02)
    for member in family:
        if is_alive(member):
            kill_tree(member)


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def is_alive(pid: int) -> bool:
    """A zombie has ended: its parent has not read its status yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _state(pid) not in {"Z", "X"}


def born(pid: int) -> str:
    """What distinguishes this process from a later one with the same number."""
    return " ".join(_stat(pid)[19:20])


def _parents() -> list[tuple[int, int]]:
    if Path("/proc/self/stat").exists():
        numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [(number, int(fields[1])) for number in numbers if (fields := _stat(number))]
    listing = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
    return [(int(pid), int(parent)) for pid, parent in (line.split() for line in listing.splitlines())]


def _state(pid: int) -> str:
    return (_stat(pid) or ["?"])[0]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the name before them may hold spaces and parentheses."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class Charge:
    """What to end and to remove once the owner has ended."""

    def __init__(self) -> None:
        self.processes: dict[int, tuple[int, str]] = {}
        self.directories: set[str] = set()

    def take(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "watch":
                self.processes[order["pid"]] = (order["ask_with"], born(order["pid"]))
            case "forget":
                self.processes.pop(order["pid"], None)
            case "remove":
                self.directories.add(order["directory"])
            case "keep":
                self.directories.discard(order["directory"])

    def end(self) -> None:
        for pid, (ask_with, birth) in self.processes.items():
            if born(pid) == birth:
                end_tree(pid, ask_with)
        for directory in self.directories:
            shutil.rmtree(directory, ignore_errors=True)


def watch(owner: int) -> None:
    charge = Charge()
    pending = b""
    while True:
        # Looked at before reading: an owner may be killed before we have begun, and what it said before is to be heard.
        gone = os.getppid() != owner
        ready, _, _ = select.select([0], [], [], 0 if gone else LOOK_EVERY_SECONDS)
        if not ready:
            if gone:
                break
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            break
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            charge.take(json.loads(line))
    charge.end()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(int(sys.argv[1]))
