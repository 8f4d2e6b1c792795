"""Heartbeats: each process reports its status in its database, so that an operator sees which processes are alive.

Each process updates one row and deletes it at an orderly end. Every instant comes from the database's clock, so that hosts with
different clocks can be compared. No guarantee depends on these rows: a missing row loses no message, and a stale row blocks
none.

This module contains no table: each app has its own (`database.heartbeat_table`).
"""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version

from outbox.kernel.text import NAME_LENGTH

HEARTBEAT_SECONDS = 2.0
UNCHANGED_SECONDS = 5.0
"""Interval between two heartbeats with the same content."""
AFTER_FAILURE_SECONDS = 10.0
FORGET_SECONDS = 3600.0
FORGOTTEN_AFTER = timedelta(days=1)
SILENT_AFTER = timedelta(seconds=15)
"""A process that has not written for this long is shown as silent: it was killed, is frozen or cannot reach its database."""
_VERSION_LENGTH = 32


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
