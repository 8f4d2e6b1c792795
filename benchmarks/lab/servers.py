"""The private servers of a run, started at their first use, and databases and virtual hosts on them.

They run with their packages' defaults except for the settings here, the same for every side. The checkpoint settings keep a
timed checkpoint from falling into one side's second and not into the other's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from functools import cached_property
from typing import Self

import psycopg
from psycopg import sql

from benchmarks.lab.database import Database, Specimen
from benchmarks.lab.project import ROOT, Project
from tests.support.servers import PostgresServer, RabbitServer, RedisServer

POSTGRES_SETTINGS = {
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "15min",
    "track_commit_timestamp": "on",  # the `latency` benchmark reads when an effect was committed
}
PRISTINE = "pristine"
"""The migrated, empty database that every other is a copy of."""


class Lab:
    """One PostgreSQL, one RabbitMQ and one Redis for all benchmarks of a run; everything ends with the `with` block."""

    def __init__(self) -> None:
        self._running = ExitStack()
        self._redis = RedisServer()
        self._projects = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._running.close()

    @cached_property
    def postgres(self) -> PostgresServer:
        server = self._running.enter_context(PostgresServer(**POSTGRES_SETTINGS))
        _run(["manage.py", "migrate", "--run-syncdb", "--verbosity", "0"], server.create_database(PRISTINE))
        return server

    @cached_property
    def specimen(self) -> Specimen:
        url = self.create_database("specimen", PRISTINE)
        _run(["-m", "benchmarks.actors.specimen"], url)
        with psycopg.connect(url) as connection:
            return Specimen.read(connection)

    @cached_property
    def rabbit(self) -> RabbitServer:
        return self._running.enter_context(RabbitServer())

    @cached_property
    def redis(self) -> RedisServer:
        return self._running.enter_context(self._redis)

    def new_project(self, rabbit: RabbitServer | None = None) -> Project:
        """A migrated database without rows and an empty virtual host, by default on the lab's own broker."""
        return self._project(PRISTINE, self.rabbit if rabbit is None else rabbit)

    def blank_project(self, rabbit: RabbitServer) -> Project:
        """An empty database and an empty virtual host, for a peer."""
        return self._project("template0", rabbit)

    def _project(self, template: str, rabbit: RabbitServer) -> Project:
        self._projects += 1
        specimen = self.specimen
        url = self.create_database(f"project_{self._projects}", template)
        return Project(database=Database(url, specimen), rabbit=rabbit, broker_url=rabbit.new_vhost(), redis=self._redis)

    def create_database(self, name: str, template: str) -> str:
        with psycopg.connect(self.postgres.url_of("postgres"), autocommit=True) as connection:
            statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
            connection.execute(statement.format(sql.Identifier(name), sql.Identifier(template)))
        return self.postgres.url_of(name)


def _run(arguments: list[str], database_url: str) -> None:
    environ = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
        "DATABASE_URL": database_url,
        "BROKER_URL": "amqp://no_customer/",
    }
    subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environ, check=True)
