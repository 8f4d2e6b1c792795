"""Life signs: each running relay and consumer keeps a small file that says when its loops last moved.

A probe on the same host reads it (`exactly_once_health --live`). It needs neither the database nor the broker, so an outage of
these does not make a process look dead. The process holds a lock on its file, which the system releases when it ends, however
it ends: so a file that a killed process left is recognised, also when its pid has been given to another program.
"""

import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.wire.text import describe

try:
    import fcntl
except ImportError:  # Windows: no process runs there, see `require_posix`
    HAS_FCNTL = False
else:
    HAS_FCNTL = True

logger = escaping_logger(__name__)

_LENGTH = 200
"""All contents have this length, so that one write replaces them."""


@dataclass(frozen=True, kw_only=True)
class LifeSign:
    """One running process of this host and user.

    Attributes:
        silent_seconds: how long ago its slowest loop moved.
        limit_seconds: a loop that is silent for longer hangs.
    """

    pid: int
    silent_seconds: float
    limit_seconds: float

    @property
    def is_alive(self) -> bool:
        return self.silent_seconds <= self.limit_seconds


class LifeSignWriter:
    """Writes the life sign of this process. A file that cannot be written is reported once, and stops nothing."""

    def __init__(self, descriptor: int | None, limit_seconds: float) -> None:
        self._descriptor = descriptor
        self._limit_seconds = limit_seconds

    def moved(self, seconds_ago: float) -> None:
        """The slowest loop of this process moved so long ago."""
        if self._descriptor is None:
            return
        content = json.dumps({"pid": os.getpid(), "moved_at": monotonic() - seconds_ago, "limit": self._limit_seconds})
        try:
            os.pwrite(self._descriptor, content.ljust(_LENGTH).encode(), 0)
        except OSError as error:
            logger.info("The life sign of this process was not written: %s", describe(error))


@contextmanager
def giving_life_signs(kind: str, limit_seconds: float) -> Iterator[LifeSignWriter]:
    """Keep the file of this process during the block.

    Args:
        kind: "relay" or "consumer".
    """
    descriptor: int | None = None
    try:
        path = _make_directory() / f"{kind}-{os.getpid()}-{secrets.token_hex(4)}"
        descriptor = _create_locked(path)
    except OSError as error:
        logger.warning(
            "This process gives no life sign, and --live fails for it: %s. Mount a writable /tmp, or set TMPDIR to a "
            "writable directory, for the process and for its probe.",
            describe(error),
        )
    writer = LifeSignWriter(descriptor, limit_seconds)
    writer.moved(0.0)
    try:
        yield writer
    finally:
        if descriptor is not None:
            with suppress(OSError):
                path.unlink()
            os.close(descriptor)


def _create_locked(path: Path) -> int:
    """Create this file and lock it, then give it its name: a probe takes an unlocked file for that of a killed process."""
    unnamed = path.with_name(f".{path.name}")
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def life_signs(kind: str) -> list[LifeSign]:
    """The running processes of this kind, on this host and of this user, by pid. Without a temporary directory: none."""
    try:
        paths = [*_directory().glob(f"{kind}-*")]
    except OSError:
        return []
    found = [sign for path in paths if (sign := _read(path)) is not None]
    return sorted(found, key=lambda sign: sign.pid)


def _read(path: Path) -> LifeSign | None:
    try:
        with path.open("rb") as file:
            if _is_unlocked(file.fileno()):
                path.unlink(missing_ok=True)  # its process has been killed
                return None
            content = json.loads(file.read())
        silent_seconds = max(monotonic() - float(content["moved_at"]), 0.0)
        return LifeSign(pid=int(content["pid"]), silent_seconds=silent_seconds, limit_seconds=float(content["limit"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_unlocked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _directory() -> Path:
    """Raises FileNotFoundError if no temporary directory is writable."""
    return Path(tempfile.gettempdir(), f"django-exactly-once-{os.getuid()}")


def _make_directory() -> Path:
    directory = _directory()
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if found.st_uid != os.getuid() or directory.is_symlink():
        raise PermissionError(f"{directory} belongs to another user")
    return directory
