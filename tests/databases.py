"""Which databases the tests run on: a private PostgreSQL, SQLite, or the one that DATABASE_URL names.

The settings only say *where* a server will be: the first test that wants the database starts it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import pytest
from django.conf import settings
from django.db import connections

from tests.support.servers import PostgresServer
from tests.support.servers.private import remove, scratch_directory

Engine = Literal["postgres", "sqlite"]
CHOICES: dict[str, tuple[Engine, ...]] = {"postgres": ("postgres",), "sqlite": ("sqlite",), "both": ("postgres", "sqlite")}

postgres = pytest.StashKey[PostgresServer]()
_directory = pytest.StashKey[Path]()


def engines(config: pytest.Config) -> tuple[Engine, ...]:
    return CHOICES[config.getoption("--db")]


def runs_on(engine: Engine, item: pytest.Item) -> bool:
    """Every test runs on PostgreSQL, unless it tests what only SQLite has; those that are marked run on SQLite."""
    if engine == "postgres":
        return item.get_closest_marker("only_sqlite") is None
    return item.get_closest_marker("every_database") is not None


def choose(engine: Engine, config: pytest.Config) -> None:
    """Set the environment that the settings of the tests read."""
    if engine == "sqlite":
        config.stash[_directory] = place = scratch_directory("sqlite", small=True)
        os.environ["DATABASE_URL"] = f"sqlite:///{place / 'default.sqlite3'}"
        os.environ["OTHER_DATABASE_URL"] = f"sqlite:///{place / 'other.sqlite3'}"
    else:
        # Only a power cut takes what is not synced: a killed server still finds in the files what it committed.
        config.stash[postgres] = server = PostgresServer(fsync="off", full_page_writes="off", jit="off")
        os.environ.setdefault("DATABASE_URL", server.url)


def switch_to(engine: Engine, config: pytest.Config) -> None:
    """As `choose`, for a process that has read the settings and opened no connection."""
    from tests.settings import databases  # noqa: PLC0415 - they read the environment, which `choose` sets

    choose(engine, config)
    config.option.db = engine
    settings.DATABASES.clear()
    settings.DATABASES.update(databases())  # type: ignore[arg-type]
    vars(connections).pop("settings", None)  # the same dictionary, to be completed with Django's defaults
    for connection in connections.all(initialized_only=True):
        del connections[connection.alias]


def forget(config: pytest.Config) -> None:
    """Remove what `choose` has made."""
    if place := config.stash.get(_directory, None):
        remove(place)
    if server := config.stash.get(postgres, None):
        server.close()
