"""Heartbeats: each process reports its status in its database, so that an operator sees which processes are alive.

Each process updates one row, and marks it as stopped at an orderly end. Every instant comes from the database's clock, so that
hosts with different clocks can be compared. No guarantee depends on these rows: a missing row loses no message, and a stale row
blocks none.

With its heartbeat a process also reads the operator's request in its row, see `process.loop`.

This module contains no table, see `upkeep.heartbeat_table`.
"""

import os
import socket
import uuid
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from exactly_once.wire.text import NAME_LENGTH

HEARTBEAT_SECONDS = 2.0
UNCHANGED_SECONDS = 5.0
"""Interval between two heartbeats with the same content."""
AFTER_FAILURE_SECONDS = 10.0
FORGET_SECONDS = 3600.0
FORGOTTEN_AFTER = timedelta(days=1)
STOPPED_SHOWN_FOR = timedelta(hours=1)
"""How long a process that has stopped in an orderly way is still shown."""
SILENT_AFTER = timedelta(seconds=15)
"""A process that has not written for this long is shown as silent: it was killed, is frozen or cannot reach its database."""
SILENCE_REPORTED_FOR = timedelta(hours=1)
"""How long a silent process is reported while others work. By then the broker has given its deliveries to them."""
REPLACED_WITHIN = timedelta(minutes=10)
"""Kubernetes starts the pods of a lost node elsewhere after six minutes."""
_VERSION_LENGTH = 32
_RATE_SECONDS = 10.0
"""A rate is an average over this time; the rate of an idle process falls to 0 within it."""
_STATM = Path("/proc/self/statm")


def one_line(text: str, limit: int = NAME_LENGTH) -> str:
    """`text` as one line that fits a column and contains no terminal control characters; it may quote a broker."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _installed_version() -> str:
    try:
        return one_line(version("django-exactly-once"), _VERSION_LENGTH)
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """Identifies this process; readers take another instance for another process."""

    id: uuid.UUID = field(default_factory=uuid.uuid4)
    host: str = field(default_factory=lambda: one_line(socket.gethostname()))
    pid: int = field(default_factory=os.getpid)
    version: str = field(default_factory=_installed_version)


class Rate:
    """Messages per second, from a count that only grows.

    Args:
        now: when the count was 0 (monotonic).
    """

    def __init__(self, now: float) -> None:
        self._samples: deque[tuple[float, int]] = deque([(now, 0)])

    def of(self, now: float, count: int) -> float:
        """The rate of the last seconds; the first second is not extrapolated."""
        self._samples.append((now, count))
        while self._samples[1][0] <= now - _RATE_SECONDS:
            self._samples.popleft()
        since, before = self._samples[0]
        return round((count - before) / max(now - since, 1.0), 1)


def resident_bytes() -> int:
    """The resident memory of this process; without /proc, its peak."""
    with suppress(OSError, ValueError, IndexError):
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource  # noqa: PLC0415 - Windows has none, and imports this module, too

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 2)
