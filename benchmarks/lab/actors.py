"""Running the programs in `benchmarks/actors/`, and reading what they print."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from benchmarks.lab.processes import Process, running
from benchmarks.lab.project import Project
from benchmarks.lab.waiting import wait_for_end


def acting(project: Project, actor: str, *arguments: object, **outbox: Any) -> AbstractContextManager[Process]:
    """`benchmarks.actors.<actor>` as a process beside this one, which ends by itself."""
    return running([sys.executable, "-m", f"benchmarks.actors.{actor}", *map(str, arguments)], project, ends=True, **outbox)


def act(project: Project, actor: str, *arguments: object, **outbox: Any) -> Any:
    """Run an actor to its end; its answer."""
    with acting(project, actor, *arguments, **outbox) as process:
        wait_for_end(process, project)
        return process.answer()
