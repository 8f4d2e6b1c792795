"""Heartbeats: what a running process says of itself in its database, so that people see which processes live.

One row for each process, written over and over and deleted when it ends in an orderly way. Every instant is of the database's
clock, so that hosts whose clocks differ can be compared. Nothing that is promised rests on these rows: a missing one loses no
message, a stale one holds none.

This module knows no table: each half has its own (`database.heartbeat_table`).
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
"""Between two heartbeats that say the same."""
AFTER_FAILURE_SECONDS = 10.0
FORGET_SECONDS = 3600.0
FORGOTTEN_AFTER = timedelta(days=1)
SILENT_AFTER = timedelta(seconds=15)
"""A process that has not written for this long is shown as silent: it was killed, is frozen, or cannot reach its database."""
_VERSION_LENGTH = 32


def one_line(text: str, limit: int = NAME_LENGTH) -> str:
    """One line that a column takes and that moves nothing on a terminal; a broker's words are not ours."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _installed_version() -> str:
    try:
        return one_line(version("django-exactly-once"), _VERSION_LENGTH)
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """Which process this is; another instance is another process to those who read."""

    id: uuid.UUID = field(default_factory=uuid.uuid4)
    host: str = field(default_factory=lambda: one_line(socket.gethostname()))
    pid: int = field(default_factory=os.getpid)
    version: str = field(default_factory=_installed_version)
