"""The ways of a delivery through the inbox stay short: a budget of calls, modules, moves and round trips for each."""

import json
import subprocess
import sys

import pytest

BUDGETS = {
    "fresh delivery": {"calls": 113, "modules": 20, "moves": 56, "round trips": 2},
    "10 fresh deliveries in turn": {"calls": 950, "modules": 21, "moves": 494, "round trips": 11},
    "group commit of 50": {"calls": 1694, "modules": 20, "moves": 895, "round trips": 2},
    "batch of 100": {"calls": 2599, "modules": 20, "moves": 1149, "round trips": 2},
    "stored message": {"calls": 170, "modules": 27, "moves": 92, "round trips": 3},
    "lease in the database": {"calls": 129, "modules": 24, "moves": 72, "round trips": 2},
    "ordered": {"calls": 282, "modules": 31, "moves": 148, "round trips": 7},
    "idempotent Celery task": {"calls": 119, "modules": 24, "moves": 70, "round trips": 2},
    "first failure": {"calls": 236, "modules": 32, "moves": 98, "round trips": 3},
    "failing retry": {"calls": 264, "modules": 38, "moves": 122, "round trips": 3},
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
