"""The ways of a delivery through the inbox stay short: a budget of calls, modules, moves and round trips for each."""

from __future__ import annotations

import pytest

from benchmarks.lab.paths import figures, paths

BUDGETS = {
    "fresh delivery": {"calls": 135, "modules": 25, "moves": 72, "round trips": 2},
    "group commit of 50": {"calls": 2304, "modules": 25, "moves": 1053, "round trips": 2},
    "batch of 100": {"calls": 3808, "modules": 25, "moves": 1457, "round trips": 2},
    "stored message": {"calls": 218, "modules": 34, "moves": 97, "round trips": 4},
    "lease in the database": {"calls": 153, "modules": 32, "moves": 86, "round trips": 2},
    "ordered": {"calls": 345, "modules": 41, "moves": 155, "round trips": 9},
    "idempotent Celery task": {"calls": 126, "modules": 27, "moves": 78, "round trips": 2},
    "first failure": {"calls": 235, "modules": 35, "moves": 108, "round trips": 6},
    "failing retry": {"calls": 306, "modules": 41, "moves": 140, "round trips": 8},
}
"""What each takes today. A change that needs less lowers its figures; one that needs more has to say why."""


@pytest.mark.django_db(transaction=True)
def test_no_way_of_a_message_is_longer_than_its_budget():
    found = {way: figures(trace) for way, trace in paths().items()}

    over = {
        way: {name: f"{count}, budget {BUDGETS[way][name]}" for name, count in counts.items() if count > BUDGETS[way][name]}
        for way, counts in found.items()
    }
    assert not {way: what for way, what in over.items() if what}
    assert found.keys() == BUDGETS.keys()
