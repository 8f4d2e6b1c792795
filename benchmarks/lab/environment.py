"""The environment of the figures: the machine, and the versions of everything."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.lab.broker import connected
from benchmarks.lab.project import ROOT
from benchmarks.lab.servers import POSTGRES_SETTINGS, Lab

PACKAGES = ("Django", "kombu", "amqp", "psycopg", "celery", "redis")


def environment(lab: Lab) -> dict[str, Any]:
    return {
        "measured_at": datetime.now(tz=UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "machine": {
            "processors": os.cpu_count(),
            "processor": _line_of("/proc/cpuinfo", "model name"),
            "memory": _line_of("/proc/meminfo", "MemTotal"),
            "system": platform.platform(),
        },
        "versions": {
            "Python": sys.version.split()[0],
            **{package: version(package) for package in PACKAGES},
            "libpq": psycopg.pq.version_pretty(psycopg.pq.version()),
            **_servers(lab),
        },
        "postgresql_settings": POSTGRES_SETTINGS,
    }


def load() -> float:
    """The load average of the last minute: the other work of the machine."""
    return os.getloadavg()[0]


def _servers(lab: Lab) -> dict[str, str]:
    with psycopg.connect(lab.postgres.url_of("postgres")) as connection:
        postgres = connection.execute("SHOW server_version").fetchone()
    with connected(lab.rabbit.url) as connection:
        rabbit = connection.server_properties
    return {"PostgreSQL": str(postgres and postgres[0]), "RabbitMQ": rabbit["version"], "Erlang": rabbit["platform"]}


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _line_of(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
