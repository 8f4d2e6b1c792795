"""Which tests run, and what they need: `--db`, `--core`.

Django's settings are read before any conftest, so this is a plugin of its own (`-p tests.plugin` in pyproject.toml).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Generator

import pytest

from tests import databases, tiers
from tests.support.servers import ServerUnavailable, binaries

FETCHED_FOR: dict[str, list[Callable[[], object]]] = {
    "postgres_server": [binaries.postgres],
    "_mortal_postgres": [binaries.postgres],
    "pgbouncer": [binaries.pgbouncer],
    "rabbitmq_server": [binaries.rabbitmq],
    "mortal_rabbitmq": [binaries.rabbitmq],
    "redis_server": [binaries.redis],
    "broker": [binaries.rabbitmq, binaries.redis],  # it asks for either by its name
    "skewed_by": [binaries.faketime],
}

collected = pytest.StashKey[set[str]]()
"""The test functions of this run before any was deselected, as node ids without parameters."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--db",
        choices=databases.CHOICES,
        default="postgres",
        help="a private PostgreSQL (or DATABASE_URL, if set), SQLite with the tests that are marked for it, or both",
    )
    parser.addoption("--core", action="store_true", help="only the core (see tests/tiers.py)")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None]:
    """A wrapper, so that it comes before pytest-django reads the settings."""
    given = early_config.known_args_namespace
    if not given.workers:
        if given.db == "both":
            raise pytest.UsageError("--db both needs --workers: one process has one database.")
        databases.choose(given.db, early_config)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is not asked for. A skip would hide a test among those that may pass."""
    config.stash[collected] = {item.nodeid.partition("[")[0] for item in items}
    engines = databases.engines(config)
    kept = [item for item in items if any(databases.runs_on(engine, item) for engine in engines)]
    if config.getoption("--core"):
        kept = tiers.core(kept)
        if config.args_source is pytest.Config.ArgsSource.TESTPATHS and (missing := tiers.PROMISES - tiers.names(kept)):
            raise pytest.UsageError(f"tests/tiers.py names tests that do not exist: {', '.join(sorted(missing))}")
    config.hook.pytest_deselected(items=[*{*items} - {*kept}])
    items[:] = kept


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
    if "postgres" in databases.engines(session.config) and any(item.get_closest_marker("django_db") for item in session.items):
        wanted.add("postgres_server")
    for fetch in {fetch for fixture, fetches in FETCHED_FOR.items() if fixture in wanted for fetch in fetches}:
        with contextlib.suppress(ServerUnavailable):  # the fixture says it again, in the test that needs the server
            fetch()


def pytest_unconfigure(config: pytest.Config) -> None:
    databases.forget(config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape in captured logs what is not UTF-8: some tests log lone surrogates, which no terminal can show."""
    report = yield
    report.sections = [(title, text.encode("utf-8", "backslashreplace").decode()) for title, text in report.sections]
    return report
