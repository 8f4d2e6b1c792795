"""Which database the suite runs on: a private PostgreSQL, unless `--db sqlite` or DATABASE_URL say otherwise.

Django's settings are read before any conftest, so this is a plugin of its own (`-p tests.plugin` in pyproject.toml). It
only decides *where* the server will be: the first test that wants the database starts it.

With pytest-xdist (`-n 4`) every worker has servers of its own, so a test that kills one disturbs no other worker. The process
that distributes the tests runs none, and has no database.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Literal, get_args

import pytest

from tests.support.servers import PostgresServer, ServerUnavailable, binaries
from tests.support.servers.private import remove, scratch_directory

Engine = Literal["postgres", "sqlite"]

FETCHED_FOR: dict[str, list[Callable[[], object]]] = {
    "postgres_server": [binaries.postgres],
    "_mortal_postgres": [binaries.postgres],
    "pgbouncer": [binaries.pgbouncer],
    "rabbitmq_server": [binaries.rabbitmq],
    "redis_server": [binaries.redis],
    "broker": [binaries.rabbitmq, binaries.redis],  # it asks for either by its name
    "skewed_by": [binaries.faketime],
}

_TESTS = Path(__file__).parent
_CRASH = _TESTS / "crash"
_STARTS_PROCESSES = {"test_documented_examples.py", "test_effect_once.py", "test_unmigrated_databases.py"}

postgres = pytest.StashKey[PostgresServer]()
directory = pytest.StashKey[Path]()
collected = pytest.StashKey[set[str]]()
"""The test functions of this run before any was deselected, as node ids without parameters."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--db",
        choices=get_args(Engine),
        default="postgres",
        help="database the suite runs on: a private PostgreSQL (or DATABASE_URL, if set), or SQLite",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None]:
    """A wrapper, so that it comes before pytest-django reads the settings."""
    given = early_config.known_args_namespace
    only_distributes = getattr(given, "numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ
    match None if only_distributes else given.db:
        case "sqlite":
            early_config.stash[directory] = place = scratch_directory("sqlite", small=True)
            os.environ["DATABASE_URL"] = f"sqlite:///{place / 'default.sqlite3'}"
            os.environ["OTHER_DATABASE_URL"] = f"sqlite:///{place / 'other.sqlite3'}"
        case "postgres":
            # Only a power cut takes what is not synced: a killed server still finds in the files what it committed.
            early_config.stash[postgres] = server = PostgresServer(fsync="off", full_page_writes="off", jit="off")
            os.environ.setdefault("DATABASE_URL", server.url)
    return (yield)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore a module without the mark that is asked for: to read it takes much less time than to import it, in each worker."""
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    asked_for = set(re.findall(r"(?<!\bnot )\b(every_database|proof)\b", config.option.markexpr))
    if config.getoption("--db") == "sqlite":
        asked_for.discard("proof")  # see below
    text = collection_path.read_text() if asked_for else ""
    return not all(mark in text for mark in asked_for) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import all test modules, beginning with a part of this worker's own.

    In a new checkout they have to be compiled, and all workers begin at the same time: with the same module first, each would
    compile all of them, which takes three times as long as the import.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if not count or [Path(name).resolve() for name in session.config.args] != [_TESTS]:
        return
    paths = [path for path in _TESTS.rglob("test_*.py") if not pytest_ignore_collect(path, session.config)]
    modules = sorted(path.relative_to(_TESTS.parent) for path in paths)
    first = len(modules) * int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) // count
    for path in modules[first:] + modules[:first]:
        with contextlib.suppress(Exception):  # the collection reports it
            importlib.import_module(".".join(path.with_suffix("").parts))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fetch what the chosen tests need before the first of them runs: an installation outlasts a test's timeout.

    The tests themselves are excluded from garbage collection: each full collection would visit them all again, which
    takes half as long as a short test.
    """
    if session.config.option.collectonly:
        return
    gc.collect()
    gc.freeze()
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", [])}
    if session.config.stash.get(postgres, None) and any(item.get_closest_marker("django_db") for item in session.items):
        wanted.add("postgres_server")
    for fetch in {fetch for fixture, fetches in FETCHED_FOR.items() if fixture in wanted for fetch in fetches}:
        with contextlib.suppress(ServerUnavailable):  # the fixture says it again, in the test that needs the server
            fetch()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On SQLite, leave tests that start processes to `make proof`: on PostgreSQL `make test` has run the same ones."""
    config.stash[collected] = {item.nodeid.partition("[")[0] for item in items}
    if config.getoption("--db") != "sqlite":
        return
    for item in items:
        names = getattr(item, "fixturenames", [])
        if "process_environment" in names or item.path.is_relative_to(_CRASH) or item.path.name in _STARTS_PROCESSES:
            item.add_marker("proof")


def pytest_unconfigure(config: pytest.Config) -> None:
    if place := config.stash.get(directory, None):
        remove(place)
    if server := config.stash.get(postgres, None):
        server.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape in captured logs what is not UTF-8: some tests log lone surrogates, and a worker cannot send such a report."""
    report = yield
    report.sections = [(title, text.encode("utf-8", "backslashreplace").decode()) for title, text in report.sections]
    return report
