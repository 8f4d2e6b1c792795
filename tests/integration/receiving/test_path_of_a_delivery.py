"""The ways of a delivery through the inbox stay short: a budget of calls, modules, moves and round trips for each."""

import json
import subprocess
import sys

import pytest

BUDGETS = {
    "fresh delivery": {"calls": 104, "modules": 18, "moves": 52, "round trips": 2},
    "10 fresh deliveries in turn": {"calls": 912, "modules": 20, "moves": 462, "round trips": 11},
    "group commit of 50": {"calls": 1636, "modules": 19, "moves": 842, "round trips": 2},
    "batch of 100": {"calls": 2491, "modules": 19, "moves": 1046, "round trips": 2},
    "stored message": {"calls": 166, "modules": 28, "moves": 92, "round trips": 3},
    "lease in the database": {"calls": 127, "modules": 24, "moves": 68, "round trips": 2},
    "duplicate": {"calls": 105, "modules": 21, "moves": 53, "round trips": 3},
    "ordered": {"calls": 274, "modules": 32, "moves": 144, "round trips": 7},
    "idempotent Celery task": {"calls": 112, "modules": 23, "moves": 70, "round trips": 2},
    "first failure": {"calls": 231, "modules": 31, "moves": 92, "round trips": 3},
    "failing retry": {"calls": 263, "modules": 39, "moves": 123, "round trips": 3},
}
"""What each takes today. A change that needs less lowers its figures; one that needs more has to say why."""


@pytest.mark.django_db(transaction=True)
def test_no_way_of_a_message_is_longer_than_its_budget(process_environment):
    """In a process of its own: metrics, traces and connections of other tests would be counted."""
    environment = {**process_environment, "DJANGO_SETTINGS_MODULE": "tests.support.apps.worker.settings"}
    traced = subprocess.run(
        [sys.executable, "-m", "benchmarks.actors.paths"], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(traced.stdout.splitlines()[-1])

    over = {
        way: {name: f"{count}, budget {BUDGETS[way][name]}" for name, count in counts.items() if count > BUDGETS[way][name]}
        for way, counts in found.items()
    }
    assert not {way: what for way, what in over.items() if what}
    assert found.keys() == BUDGETS.keys()
