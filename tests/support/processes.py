"""Management commands and Celery workers as processes that a test may kill.

A `Forked` process starts in some ten milliseconds, because its interpreter has imported and set up Django already: it is
forked from a template, one for each settings module (see `template`). Apart from that it is a process like any other: with an
environment, settings and connections of its own, ended by SIGKILL at any instruction, leaving through the interpreter's own
end. A fresh interpreter runs what a template cannot stand for: settings that are not below `tests`, a preloaded library.

The idea is that of multiprocessing's forkserver, which cannot be used here: its children import the parent's `__main__`, which
is pytest, and nothing in them reads Django's settings again.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.support import ROOT

READ_AT_IMPORT = ("DJANGO_SETTINGS_MODULE", "LEASE_SECONDS", "C_FORCE_ROOT")
"""Environment variables that modules read while they are imported: another value needs another template."""
PRELOADING = {"LD_PRELOAD", "DYLD_INSERT_LIBRARIES"}
NUMBER = struct.Struct("!q")
"""A process id or a wait status, as a keeper writes it."""
INHERITED = ("HOME", "LANG", "PATH", "PYTHONPATH", "TMPDIR")


def start(command: list[str], *, environment: dict[str, str], log: Path) -> Forked | subprocess.Popen[bytes]:
    """`python -m <command>` at the head of a process group of its own, which appends what it says to `log`."""
    if environment["DJANGO_SETTINGS_MODULE"].startswith("tests.") and not PRELOADING & environment.keys():
        return Forked(command, environment=environment, log=log)
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


class Forked:
    """A command forked from a template; the methods are those of `subprocess.Popen` that tests use."""

    def __init__(self, command: list[str], *, environment: dict[str, str], log: Path) -> None:
        self.args = command
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._answers, theirs = socket.socketpair()
        with theirs, log.open("ab") as output, _asking:
            request = {"command": command, "environment": environment}
            _template_for(environment).ask(request, theirs.fileno(), output.fileno())
            theirs.close()  # now the end of the keeper is the end of the stream
            self.pid = self._read()

    def poll(self) -> int | None:
        return self._result(0.0)

    def wait(self, timeout: float | None = None) -> int:
        result = self._result(timeout)
        if result is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return result

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _result(self, timeout: float | None) -> int | None:
        if self.returncode is None and _readable(self._answers, timeout):
            with self._lock:
                if self.returncode is None:
                    self.returncode = os.waitstatus_to_exitcode(self._read())
                    self._answers.close()
        return self.returncode

    def _read(self) -> int:
        # Eight bytes that were written at once do not come in parts.
        data = self._answers.recv(NUMBER.size)
        if len(data) != NUMBER.size:
            raise RuntimeError(f"the process that waits for {self.args} has died")
        number: int = NUMBER.unpack(data)[0]
        return number


def _readable(source: socket.socket, timeout: float | None) -> bool:
    try:
        poll = select.poll()
        poll.register(source, select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1000))
    except ValueError:  # closed by another thread, which has read the answer
        return True


class _Template:
    def __init__(self, environment: dict[str, str]) -> None:
        self._requests, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.template", str(theirs.fileno())],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self.close)

    def ask(self, request: dict[str, Any], *descriptors: int) -> None:
        socket.send_fds(self._requests, [json.dumps(request).encode() + b"\n"], list(descriptors))

    def close(self) -> None:
        self._requests.close()
        self._process.wait()


_templates: dict[tuple[str, ...], _Template] = {}
_asking = threading.Lock()
"""One request at a time: the next one is written after the answer to this one was read."""


def _template_for(environment: dict[str, str]) -> _Template:
    fixed = {name: environment[name] for name in READ_AT_IMPORT if name in environment}
    key = tuple(f"{name}={value}" for name, value in fixed.items())
    if key not in _templates:
        inherited = {name: environment[name] for name in INHERITED if name in environment}
        _templates[key] = _Template({**inherited, **fixed})
    return _templates[key]
