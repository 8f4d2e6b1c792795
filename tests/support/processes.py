"""Management commands and Celery workers as processes that a test may kill, and Python programs in other projects.

On Linux a process starts in some ten milliseconds, because its interpreter has imported and set up Django already: it is forked
from a template, one for each settings module below `tests` (see `template`). These are forked from one that has imported Django
and Kombu and nothing of ours; so is a process with other settings. Apart from that it is a process like any other: with an
environment, settings and connections of its own, ended by SIGKILL at any instruction, leaving through the interpreter's own
end. It shares the template's hash seed. A new interpreter is started where no template can be used: a preloaded library, other
options of Python.

The idea is that of multiprocessing's forkserver, which cannot be used here: its children import the parent's `__main__`, which
is pytest, and nothing in them reads Django's settings again.
"""

from __future__ import annotations

import atexit
import contextlib
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
from tests.support.servers.private import watch

SETTINGS = "DJANGO_SETTINGS_MODULE"
READ_AT_IMPORT = (SETTINGS, "LEASE_SECONDS", "TIMEOUT_SECONDS", "EVERY_SECONDS", "C_FORCE_ROOT")
"""Environment variables that modules read while they are imported: another value needs another template."""
INHERITED = ("HOME", "LANG", "PATH", "PYTHONPATH", "TMPDIR")
TEMPLATE = "IS_A_TEMPLATE"
"""Set in the environment of a template that has settings."""
END_SECONDS = 10.0
STDERR = 2
NUMBER = struct.Struct("!q")
"""A process id or an exit status, on the way from a template to its test."""


def start(command: list[str], *, environment: dict[str, str], log: Path) -> Forked | subprocess.Popen[bytes]:
    """`python -m <command>` at the head of a process group of its own, which appends what it says to `log`."""
    with log.open("ab") as output:
        return start_python(["-m", *command], environment=environment, output=output.fileno())


def start_python(
    arguments: list[str], *, environment: dict[str, str], output: int, directory: Path = ROOT, stdin: int = subprocess.DEVNULL
) -> Forked | subprocess.Popen[bytes]:
    """`python <arguments>` in `directory`, at the head of a process group of its own."""
    if sys.platform == "linux" and _can_be_forked(arguments, environment):
        return Forked(arguments, environment=environment, output=output, directory=directory, stdin=stdin)
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=directory,
        env=environment,
        stdin=stdin,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    watch(process)
    return process


def _can_be_forked(arguments: list[str], environment: dict[str, str]) -> bool:
    ours = _of_the_interpreter(dict(os.environ)) == _of_the_interpreter(environment)
    return ours and arguments[0] in {"-c", "-m"} and environment.get("PYTHONWARNINGS", "error") == "error"


def _of_the_interpreter(environment: dict[str, str]) -> dict[str, str]:
    """What Python and the loader read before a program begins, and what a child cannot read again."""
    read_again = {"PYTHONFAULTHANDLER", "PYTHONPATH", "PYTHONWARNINGS"}
    return {name: value for name, value in environment.items() if name.startswith(("LD_", "PYTHON")) and name not in read_again}


class Forked:
    """A program forked from a template; the methods are those of `subprocess.Popen` that tests use."""

    def __init__(
        self, arguments: list[str], *, environment: dict[str, str], output: int, directory: Path = ROOT, stdin: int
    ) -> None:
        self.args = arguments
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._answers, theirs = socket.socketpair()
        try:
            with theirs, Path(os.devnull).open() as nothing, _asking:
                request = {"arguments": arguments, "environment": environment, "directory": str(directory)}
                given = nothing.fileno() if stdin == subprocess.DEVNULL else stdin
                _template_for(environment).ask(request, theirs.fileno(), given, output)
                theirs.close()  # now the end of the keeper is the end of the stream
                self.pid = self._read()
        except BaseException:
            self._answers.close()
            raise

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
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _result(self, timeout: float | None) -> int | None:
        if self.returncode is None and _readable(self._answers, timeout):
            with self._lock:
                if self.returncode is None:
                    self.returncode = self._read()
                    self._answers.close()
        return self.returncode

    def _read(self) -> int:
        # Eight bytes that were written at once do not come in parts.
        data = self._answers.recv(NUMBER.size)
        if len(data) != NUMBER.size:
            raise RuntimeError(f"the template of {self.args}, or the process that waits for it, has died")
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
    """A process that forks others: by itself when it has the `settings` of the environment, else from the template without."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._requests, theirs = socket.socketpair()
        self._process: Forked | subprocess.Popen[bytes]
        with theirs:
            arguments = ["-m", "tests.support.template"]
            if SETTINGS in environment:
                self._process = Forked(arguments, environment=environment, output=STDERR, stdin=theirs.fileno())
            else:
                command = [sys.executable, *arguments]
                self._process = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdin=theirs.fileno(), start_new_session=True
                )
        atexit.register(self.close)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], *descriptors: int) -> None:
        socket.send_fds(self._requests, [json.dumps(request).encode() + b"\n"], list(descriptors))

    def close(self) -> None:
        """It ends at the end of its requests; its children end with the sockets of this process."""
        self._requests.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_templates: dict[tuple[str, ...], _Template] = {}
_asking = threading.RLock()
"""One request at a time: the next one is written after the answer to this one was read."""


def _template_for(environment: dict[str, str]) -> _Template:
    """The template with these settings; the one without for those outside of `tests`, and for a template with settings."""
    fixed = {}
    if environment[SETTINGS].startswith("tests.") and "PYTHONWARNINGS" not in environment and TEMPLATE not in environment:
        fixed = {name: environment[name] for name in READ_AT_IMPORT if name in environment} | {TEMPLATE: "yes"}
    key = tuple(f"{name}={value}" for name, value in fixed.items())
    if key not in _templates or not _templates[key].is_alive:
        inherited = {name: environment[name] for name in INHERITED if name in environment}
        _templates[key] = _Template({**inherited, **_of_the_interpreter(environment), **fixed})
    return _templates[key]
