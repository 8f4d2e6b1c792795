"""One Django project as its processes see it: a database and a virtual host."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lab.database import Database
from tests.support.servers import RabbitServer

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Project:
    database: Database
    rabbit: RabbitServer
    broker_url: str
    extra: Mapping[str, str] = field(default_factory=dict)
    """More of the environment of its processes."""

    def environ(self, **outbox: Any) -> dict[str, str]:
        """The environment of a process of this project; `outbox` are options of the `OUTBOX` setting."""
        return {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
            "DATABASE_URL": self.database.url,
            "BROKER_URL": self.broker_url,
            "BENCH_OUTBOX": json.dumps(outbox),
            "PYTHONUNBUFFERED": "1",
            **self.extra,
        }
