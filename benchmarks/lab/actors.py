"""Running the programs in `benchmarks/actors/`, and reading what they print."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from benchmarks.lab.processes import Process, running
from benchmarks.lab.project import Project

LONGEST_SECONDS = 900.0


def acting(project: Project, actor: str, *arguments: object, **outbox: Any) -> AbstractContextManager[Process]:
    """`benchmarks.actors.<actor>` as a process beside this one."""
    return running([sys.executable, "-m", f"benchmarks.actors.{actor}", *map(str, arguments)], project, **outbox)


def act(project: Project, actor: str, *arguments: object, **outbox: Any) -> Any:
    """Run an actor to its end; its answer."""
    with acting(project, actor, *arguments, **outbox) as process:
        process.wait(LONGEST_SECONDS)
        return process.answer()
