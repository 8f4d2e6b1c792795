"""The ways of a delivery through the inbox stay short: a budget of calls, modules, moves and round trips for each."""

import json
import subprocess
import sys

import pytest

BUDGETS = {
    "fresh delivery": {"calls": 103, "modules": 18, "moves": 50, "round trips": 2},
    "10 fresh deliveries in turn": {"calls": 910, "modules": 20, "moves": 450, "round trips": 11},
    "group commit of 50": {"calls": 1635, "modules": 19, "moves": 840, "round trips": 2},
    "batch of 100": {"calls": 2490, "modules": 19, "moves": 1044, "round trips": 2},
    "stored message": {"calls": 166, "modules": 27, "moves": 92, "round trips": 3},
    "10 stored messages in turn": {"calls": 1024, "modules": 27, "moves": 598, "round trips": 14},
    "lease in the database": {"calls": 127, "modules": 24, "moves": 68, "round trips": 2},
    "10 leases in turn": {"calls": 1066, "modules": 26, "moves": 583, "round trips": 11},
    "duplicate": {"calls": 104, "modules": 21, "moves": 51, "round trips": 3},
    "ordered": {"calls": 271, "modules": 31, "moves": 142, "round trips": 7},
    "idempotent Celery task": {"calls": 107, "modules": 23, "moves": 66, "round trips": 2},
    "first failure": {"calls": 230, "modules": 31, "moves": 90, "round trips": 3},
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
