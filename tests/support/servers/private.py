"""A server process that belongs to this one: on a free port, started, killed, restarted, and always ended.

It runs in a session of its own, so that Ctrl-C reaches the tests and not the servers. Two things end it:
this process's exit, or, when this process is killed, the watcher.

This module does not know which server it runs; the modules beside it do.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, ClassVar, Self

from tests.support.servers import watcher

LOG_TAIL_LINES = 40
LOOPBACK = "127.0.0.1"
PORTS_TO_TRY = 200
MEMORY, ROOM = Path("/dev/shm"), 2**30
"""A file system in memory, and the free bytes from which on it is used: some containers have 64 MB of it."""


class ServerFailed(Exception):
    """A server did not start, or did not do what it was asked; the message ends with the tail of its log."""


class Account:
    """The user a server runs as: ourselves, or a named one when we are root and the server refuses to be."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name

    def owns(self, directory: Path) -> None:
        if self.name is not None:
            shutil.chown(directory, self.name)

    def can_reach(self, path: Path) -> bool:
        """Whether other users can reach `path`: usually they cannot read a checkout below a home directory."""
        return self.name is None or all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)


OURSELVES = Account()


class PrivateServer(ABC):
    """Start, stop, kill and restart one server. Its data survive all four; `close` and leaving a `with` remove them."""

    name: ClassVar[str]
    start_seconds: ClassVar[float] = 90.0
    stop_seconds: ClassVar[float] = 20.0
    stop_signal: ClassVar[int] = signal.SIGTERM
    orphan_signal: ClassVar[int] = signal.SIGKILL
    account: Account = OURSELVES

    def __init__(self) -> None:
        self.port = free_port()
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started_by: int | None = None
        # A client in another thread may be served, and kill the server, before `start` has seen that it answers.
        self._starting_or_ending = threading.RLock()

    @property
    @abstractmethod
    def url(self) -> str:
        """Where clients connect. Known before the start, and the same after every restart."""

    @abstractmethod
    def _prepare(self) -> None:
        """Make what the first start needs, in `self.directory`."""

    @abstractmethod
    def _launch(self) -> subprocess.Popen[bytes]:
        """Start the server's process; the caller waits until it answers."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether a client is served now. May raise what the client raises."""

    def start(self, *, waits: bool = True) -> Self:
        """Without `waits` it may not answer yet: see `answering`."""
        with self._starting_or_ending:
            if self.is_running:
                return self
            if self._directory is None:
                self._directory = scratch_directory(self.name, self.account)
                _servers.append(self)
                self._prepare()
            self._process, self._started_by = self._launch(), os.getpid()
            return self.answering() if waits else self

    def answering(self) -> Self:
        """The server, when it answers."""
        self._wait_until_it_answers()
        return self

    def stop(self) -> None:
        """Ask it to end, and kill it when that takes too long."""
        self._must_be_our_own()
        with self._starting_or_ending:
            if self.is_running:
                watcher.end_tree(self.pid, self.stop_signal, self.stop_seconds)
            self._reap()

    def kill(self) -> None:
        """SIGKILL for the server and all its processes at once: as a power cut does, except for the disk."""
        self._must_be_our_own()
        with self._starting_or_ending:
            if self.is_running:
                watcher.kill_tree(self.pid)
            self._reap()

    def restart(self) -> Self:
        self.stop()
        return self.start()

    def close(self) -> None:
        """Stop and remove the data. The next `start` begins with nothing."""
        self.stop()
        if self._directory is not None:
            remove(self._directory)
            self._directory = None
            _servers.remove(self)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        # The server of the process that this one was forked from runs until that process ends.
        return self._process is not None and (self._is_inherited or self._process.poll() is None)

    @property
    def _is_inherited(self) -> bool:
        return self._started_by not in {None, os.getpid()}

    def _must_be_our_own(self) -> None:
        if self._is_inherited:
            raise ServerFailed(f"{self.name} is shared by all workers: a test that ends it needs one of its own")

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerFailed(f"{self.name} is not running")
        return self._process.pid

    @property
    def directory(self) -> Path:
        if self._directory is None:
            raise ServerFailed(f"{self.name} was never started, so it has no directory yet")
        return self._directory

    @property
    def log(self) -> Path:
        return self.directory / "server.log"

    def log_tail(self) -> str:
        if not self.log.exists():
            return "(no log)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def _spawn(self, command: list[str], env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return spawn(command, self.account, self.directory, log, env, self.orphan_signal)

    def _run(self, command: list[str], env: dict[str, str] | None = None, timeout_seconds: float = 120.0) -> str:
        done = subprocess.run(
            command,
            user=self.account.name,
            group=None if self.account.name is None else _group_of(self.account.name),
            extra_groups=None if self.account.name is None else [],
            cwd=self.directory,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
        if done.returncode != 0:
            raise ServerFailed(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + self.start_seconds
        trouble = "it never answered"
        while time.monotonic() < deadline:
            if not self.is_running:
                trouble = "its process ended"
                break
            try:
                if self._answers():
                    return
            except Exception as error:  # noqa: BLE001 - whatever the client raises means "not yet"
                trouble = f"{type(error).__name__}: {error}"
            time.sleep(0.05)
        tail = self.log_tail()
        if not self._is_inherited:
            self.kill()
        raise ServerFailed(f"{self.name} did not start within {self.start_seconds:.0f} s: {trouble}\n--- log\n{tail}")

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait()
            forget(self._process)
            self._process = None


def spawn(
    command: list[str],
    account: Account,
    directory: Path,
    log: IO[bytes],
    env: dict[str, str] | None = None,
    orphan_signal: int = signal.SIGKILL,
    *,
    talks: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a process the watcher knows of. With `talks` its standard input and output are pipes."""
    process = subprocess.Popen(
        command,
        user=account.name,
        group=None if account.name is None else _group_of(account.name),
        extra_groups=None if account.name is None else [],
        cwd=directory,
        env=env,
        stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
        stdout=subprocess.PIPE if talks else log,
        stderr=log,
        start_new_session=True,
    )
    watch(process, orphan_signal)
    return process


def watch(process: subprocess.Popen[bytes] | subprocess.Popen[str], orphan_signal: int = signal.SIGKILL) -> None:
    """Have the watcher end this process and its descendants when we are killed before it ends."""
    _tell_watcher(do="watch", pid=process.pid, ask_with=int(orphan_signal))


def forget(process: subprocess.Popen[bytes]) -> None:
    """Notify the watcher that this process has ended: the system may soon give its number to another one."""
    _tell_watcher(do="forget", pid=process.pid)


def scratch_directory(name: str, account: Account = OURSELVES, *, small: bool = False) -> Path:
    """A new directory of `account`, removed with us; in memory if what it takes is `small`, and there is room."""
    wanted = Path(tempfile.gettempdir())
    places = [wanted, Path("/tmp"), Path("/var/tmp")]
    if small and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM:
        places.insert(0, MEMORY)
    place = next((p for p in places if p.is_dir() and account.can_reach(p / "x")), wanted)
    directory = Path(tempfile.mkdtemp(prefix=f"exactly-once-{name.lower()}-", dir=place))
    account.owns(directory)
    _tell_watcher(do="remove", directory=str(directory))
    return directory


def remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    _tell_watcher(do="keep", directory=str(directory))


def free_port() -> int:
    """A port without a listener, below the range the kernel takes for outgoing connections.

    Inside that range a client that keeps reconnecting to a server that is down ends up connected to itself sooner or
    later, and then the server cannot have its port back.

    It is this process's until it ends: another test process that draws the same number before the server listens finds the
    UDP port of that number taken.
    """
    for _ in range(PORTS_TO_TRY):
        port = random.randint(10_000, _first_outgoing_port() - 1)
        claim = socket.socket(type=socket.SOCK_DGRAM)
        with socket.socket() as probe, contextlib.suppress(OSError):
            claim.bind((LOOPBACK, port))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((LOOPBACK, port))
            _claims.append(claim)
            return port
        claim.close()
    raise ServerFailed(f"no free port on {LOOPBACK} in {PORTS_TO_TRY} attempts")


def _first_outgoing_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 32_768
    return first if first > 12_000 else 32_768


def _group_of(user: str) -> int:
    return pwd.getpwnam(user).pw_gid


_claims: list[socket.socket] = []
_servers: list[PrivateServer] = []
_watcher: subprocess.Popen[bytes] | None = None
_owner = os.getpid()
_inherited: list[object] = []


def own_what_follows() -> None:
    """In a forked process: leave the servers of the parent to it, and own those that are started from now on."""
    global _watcher, _owner
    _inherited.append((_watcher, list(_servers)))  # they must not be closed here
    _watcher, _owner = None, os.getpid()
    _servers.clear()


def _tell_watcher(**order: object) -> None:
    global _watcher  # noqa: PLW0603 - one for the process, started with the first server
    if os.getpid() != _owner:
        raise ServerFailed("a forked child does not own its parent's servers")
    if _watcher is None:
        _watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", watcher.__file__, str(_owner)], cwd="/", stdin=subprocess.PIPE, start_new_session=True
        )
        atexit.register(_end_everything)
    assert _watcher.stdin is not None
    _watcher.stdin.write(json.dumps(order).encode() + b"\n")
    _watcher.stdin.flush()


def _end_everything() -> None:
    if os.getpid() != _owner:
        return
    for server in list(_servers):  # noqa: PERF101 - close() takes itself off the list
        with contextlib.suppress(Exception):
            server.close()
    if _watcher is not None and _watcher.stdin is not None:
        _watcher.stdin.close()
        _watcher.wait()
