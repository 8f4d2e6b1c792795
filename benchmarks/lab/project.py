"""One Django project as its processes see it: a database, a virtual host, and the Redis of the lab.

A benchmark measures in blocks. `Project.empty` is the only place where what a block leaves behind is removed, from all three:
a biz-id is stored in the database and, under leases, in Redis, and a message of the next block would be a duplicate while one
of them has its biz-id.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lab.broker import connected
from benchmarks.lab.database import Database
from tests.support.servers import RabbitServer, RedisServer

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Project:
    """
    Attributes:
        redis: shared by all projects, because one benchmark runs at a time; started when a benchmark asks the lab for it.
        extra: more of the environment of its processes.
    """

    database: Database
    rabbit: RabbitServer
    broker_url: str
    redis: RedisServer
    extra: Mapping[str, str] = field(default_factory=dict)

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

    def empty(self) -> None:
        """No rows, no queues, no keys in Redis. None of the project's processes may be at work."""
        self._delete_queues()
        self.database.empty()
        if self.redis.is_running:
            self.redis.flush()

    def _delete_queues(self) -> None:
        queues = self.queue_lengths()
        if not queues:
            return
        with connected(self.broker_url) as connection:
            channel = connection.channel()
            for queue in queues:
                channel.queue_delete(queue)

    def queue_lengths(self) -> dict[str, int]:
        """Messages in each queue now, by its leader's own count, with those that are delivered and not acknowledged."""
        return self.rabbit.queue_lengths(self.broker_url)
