"""What one piece of work costs, in counts that are the same on every machine: calls of our functions, and round trips.

A *call* is the call or resumption of a Python function of this project's packages on the calling thread; a *move* is one that
follows a call in another module. *Modules* are the files of these functions. A *round trip* is one wait for PostgreSQL, by the
trace of libpq: whatever was sent before it, in one pipeline or as one statement.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from django.db import connection

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(f"{ROOT / name}{os.sep}" for name in ("exactly_once", "inbox", "outbox"))


@dataclass(frozen=True)
class Trace:
    """
    Attributes:
        called: file and name of each function, in the order of the calls.
        sent: the first words of the statements of each round trip.
    """

    called: list[tuple[str, str]]
    sent: list[str]

    @property
    def calls(self) -> int:
        return len(self.called)

    @property
    def modules(self) -> int:
        return len({file for file, _ in self.called})

    @property
    def moves(self) -> int:
        files = [file for file, _ in self.called]
        return sum(before != after for before, after in pairwise(files))

    @property
    def round_trips(self) -> int:
        return len(self.sent)


def traced(run: Callable[[], object]) -> Trace:
    """Run it on this thread, with this thread's connection to the default database, which must be open."""
    called: list[tuple[str, str]] = []

    def profile(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            called.append((str(Path(frame.f_code.co_filename).relative_to(ROOT)), frame.f_code.co_qualname))

    with tempfile.NamedTemporaryFile("r") as log:
        pgconn = connection.connection.pgconn
        pgconn.trace(log.fileno())
        sys.setprofile(profile)
        try:
            run()
        finally:
            sys.setprofile(None)
            pgconn.untrace()
        log.seek(0)
        return Trace(called, _round_trips(log.read()))


def _round_trips(log: str) -> list[str]:
    """Runs of messages from the client (F), each followed by the server's (B), in the text of `PQtrace`."""
    found: list[str] = []
    is_sending = False
    for _, side, _, message in (line.split("\t", 3) for line in log.split("\n") if line.count("\t") >= 3):
        if side == "F" and is_sending:
            found[-1] += f"; {message}"
        elif side == "F":
            found.append(message)
        is_sending = side == "F"
    return found
