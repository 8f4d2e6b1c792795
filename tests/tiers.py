"""Which tests belong to the core, which `make test` runs: decided by what a test needs.

Outside are killed servers, browsers, and processes that a test starts and waits for.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
OUTSIDE = {
    "process_environment": "starts commands as processes",
    "mortal_postgres": "kills or stalls PostgreSQL",
    "mortal_rabbitmq": "kills or reconfigures RabbitMQ",
    "operator": "opens a browser",
    "skewed_by": "starts processes with another clock",
    "run_in_the_shop": "runs the demo",
}
"""Fixtures, and what makes a test with them take long."""
DIRECTORIES = ("crash", "demo", "tutorial", "integration/browser", "integration/package")


def fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


def is_core(item: pytest.Item) -> bool:
    return not (
        item.get_closest_marker("proof")
        or fixtures(item) & OUTSIDE.keys()
        or any(item.path.is_relative_to(TESTS / directory) for directory in DIRECTORIES)
    )
