"""Peers in virtual environments of their own, which are created at first use and again when their requirements have changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import UUID

import amqp

from benchmarks.lab.arrivals import Arrivals
from benchmarks.lab.plan import say
from benchmarks.lab.processes import running
from benchmarks.lab.project import ROOT, Project
from benchmarks.lab.waiting import wait_for_end

PLACE = ROOT / "benchmarks" / ".peers"
LOG_TAIL = 2000


class PeerUnavailable(Exception):
    """A peer cannot be installed here; the message says why."""


@dataclass(frozen=True)
class Installation:
    """A virtual environment.

    Attributes:
        name: of its directory.
        requirements: what is installed in it, pinned.
        oldest: Python that it runs on.
    """

    name: str
    requirements: Sequence[str]
    oldest: tuple[int, int] = (3, 0)

    def install(self) -> None:
        """
        Raises:
            PeerUnavailable: pip could not, or there is no Python that is new enough.
        """
        wanted = "\n".join(self.requirements)
        marker = self._directory / "installed.txt"
        if marker.exists() and marker.read_text() == wanted:
            return
        say(f"installing {self.name}")
        for command in (
            [_interpreter(self.oldest), "-m", "venv", "--clear", str(self._directory)],
            [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *self.requirements],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise PeerUnavailable(f"{self.name} cannot be installed: {(done.stderr or done.stdout)[-LOG_TAIL:].strip()}")
        marker.write_text(wanted)

    def versions(self) -> dict[str, str]:
        command = [self.python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {entry["name"]: entry["version"] for entry in json.loads(listing)}

    @property
    def python(self) -> str:
        return str(self._directory / "bin" / "python")

    @property
    def _directory(self) -> Path:
        return PLACE / self.name


@dataclass(frozen=True, kw_only=True)
class Peer(Installation):
    """One other implementation; its name is its package, and the name of its side.

    Attributes:
        driver: the module in `benchmarks.peers`.
        options: of its `drain`, the fastest last known first. All are tried; the fastest is measured.
        unit: of its rate.
        read: records what it sent to the broker; None if it uses none.
    """

    driver: str
    options: Sequence[Mapping[str, Any]]
    unit: str = "msg/s"
    read: Callable[[Arrivals, amqp.Message], None] | None = None

    def drain(self, project: Project, count: int, options: Mapping[str, Any], **environ: str) -> dict[str, Any]:
        """Run the driver to its end; its answer."""
        command = [self.python, "-m", f"benchmarks.peers.{self.driver}", str(count), json.dumps(options)]
        with running(command, replace(project, extra=environ), ends=True) as process:
            wait_for_end(process, project)
            answer: dict[str, Any] = process.answer()
        return answer


def _interpreter(oldest: tuple[int, int]) -> str:
    """This Python, or the next version of it on PATH or of pyenv, if that is too old."""
    if sys.version_info >= oldest:
        return sys.executable
    for name in (f"python{oldest[0]}.{minor}" for minor in range(oldest[1], oldest[1] + 4)):
        for known in ["", *_said("pyenv", "whence", name).split()]:
            if found := _said(name, "-c", "import sys; print(sys.executable)", PYENV_VERSION=known):
                return found
    raise PeerUnavailable(f"there is no Python {oldest[0]}.{oldest[1]} or newer")


def _said(*command: str, **environ: str) -> str:
    """The output of a program; "" if there is none or it fails."""
    try:
        done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _read_task(arrivals: Arrivals, message: amqp.Message) -> None:
    arguments, _, _ = json.loads(message.body)
    arrivals.note(number=arguments[0]["order"], message_id=UUID(message.properties["correlation_id"]))


def _read_stomp(arrivals: Arrivals, message: amqp.Message) -> None:
    message_id = UUID(message.properties["application_headers"]["dop-msg-id"])
    arrivals.note(number=json.loads(message.body)["order"], message_id=message_id)


SAME_DJANGO = (f"Django=={version('Django')}", f"psycopg[binary]=={version('psycopg')}")
"""As ours, so that they are not what is compared."""

CELERY_OUTBOX = Peer(
    name="django-celery-outbox",
    requirements=("django-celery-outbox==0.4.3", f"kombu=={version('kombu')}", *SAME_DJANGO),
    driver="celery_outbox",
    options=[
        {"publish_concurrency": 16, "batch_size": 500},
        {"publish_concurrency": 8, "batch_size": 500},
        {"publish_concurrency": 8, "batch_size": 100},
        {"publish_concurrency": 32, "batch_size": 500},
        {"publish_concurrency": 16, "batch_size": 1000},
        {"publish_concurrency": 32, "batch_size": 1000},
    ],
    read=_read_task,
)
OUTBOX_PATTERN = Peer(
    name="django-outbox-pattern",
    requirements=("django-outbox-pattern==3.2.1", *SAME_DJANGO),
    driver="outbox_pattern",
    options=[{}],
    read=_read_stomp,
)
PROCRASTINATE = Peer(
    name="procrastinate",
    requirements=("procrastinate[django]==3.10.0", f"psycopg[binary,pool]=={version('psycopg')}", *SAME_DJANGO),
    driver="procrastinate_worker",
    options=[{"concurrency": 16}, {"concurrency": 4}, {"concurrency": 50}],
    unit="jobs/s",
)
SAME_TASKS = (f"django-tasks=={version('django-tasks')}", *SAME_DJANGO)
TASKS_DB = Installation("django-tasks-db", ("django-tasks-db==0.13.0", *SAME_TASKS))
OX = Installation("django-ox", ("django-ox==1.9.1", *SAME_TASKS), oldest=(3, 12))
