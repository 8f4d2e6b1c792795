"""Which tests belong to the core, which `make test` runs: decided by their fixtures, their place, and the mark `long`.

Outside are killed servers, browsers, and processes that a test starts and waits for. RabbitMQ is in it for the contract of the
transports, for Celery and for `PROMISES`. `make all` runs everything.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

OUTSIDE = {
    "process_environment": "starts commands as processes, and waits for them",
    "run_in_the_shop": "runs the demo",
    "project": "runs pytest in another project",
    "rabbitmq_url": "waits for deliveries of RabbitMQ",
    "mortal_postgres": "kills or stalls PostgreSQL",
    "mortal_rabbitmq": "kills or reconfigures RabbitMQ",
    "skewed_by": "starts a server with another clock",
    "network": "breaks connections, and waits for timeouts",
    "operator": "opens a browser",
}
"""Fixtures, and what takes long in a test that has one of them."""

DIRECTORIES = (
    "crash",
    "demo",
    "docs",
    "tools",
    "tutorial",
    "integration/benchmarks",
    "integration/browser",
    "integration/package",
)
"""What is in these is outside, too."""

KILL_POINTS, OUTAGES = "crash/test_kill_points.py::test_a_", "integration/relay/test_outages.py::test_"
PROMISES = {
    f"{KILL_POINTS}relay_killed_at_any_point_loses_nothing_and_doubles_no_effect[confirmed, not settled]",
    f"{KILL_POINTS}consumer_killed_at_any_point_loses_nothing_and_doubles_no_effect[committed, not acknowledged]",
    f"{KILL_POINTS}process_without_a_broker_killed_at_any_point_loses_nothing[settled, not committed]",
    f"{OUTAGES}broker_restarted_after_a_kill_has_every_accepted_message[mortal_rabbitmq-rabbitmq_url]",
    "integration/consumer/test_concurrency.py::TestProcesses::test_database_restarted_under_load_costs_no_effect_and_no_attempt",
    "crash/test_outages.py::test_a_relay_whose_connection_is_cut_in_the_middle_of_batches_loses_nothing",
}
"""One test for each crash of which the README promises that no message is lost. They are in the core, whatever they need."""


CASES = 2
"""The core runs at most this many cases of a parametrised test, of those for one database and of those for both."""


def fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


def core(items: list[pytest.Item]) -> list[pytest.Item]:
    cases: Counter[tuple[str, bool]] = Counter()
    chosen = []
    for item in items:
        kind = item.nodeid.partition("[")[0], item.get_closest_marker("every_database") is None
        if is_core(item) and (cases[kind] < CASES or _keeps_a_promise(item)):
            cases[kind] += 1
            chosen.append(item)
    return chosen


def is_core(item: pytest.Item) -> bool:
    return _keeps_a_promise(item) or not (
        item.get_closest_marker("long")
        or fixtures(item) & OUTSIDE.keys()
        or any(item.path.is_relative_to(TESTS / directory) for directory in DIRECTORIES)
    )


def names(items: list[pytest.Item]) -> set[str]:
    return {item.nodeid.removeprefix("tests/") for item in items}


def _keeps_a_promise(item: pytest.Item) -> bool:
    return bool(PROMISES & names([item]))
