"""The ways of a delivery through the inbox stay short: a budget of calls, modules, moves and round trips for each."""

from __future__ import annotations

import pytest

from benchmarks.lab.paths import figures, paths

BUDGETS = {
    "fresh delivery": {"calls": 175, "modules": 33, "moves": 100, "round trips": 2},
    "group commit of 50": {"calls": 3959, "modules": 33, "moves": 2257, "round trips": 2},
    "batch of 100": {"calls": 6720, "modules": 32, "moves": 3364, "round trips": 2},
    "stored message": {"calls": 238, "modules": 39, "moves": 112, "round trips": 4},
    "lease in the database": {"calls": 182, "modules": 39, "moves": 110, "round trips": 2},
    "ordered": {"calls": 387, "modules": 47, "moves": 185, "round trips": 9},
    "idempotent Celery task": {"calls": 145, "modules": 31, "moves": 93, "round trips": 2},
    "first failure": {"calls": 268, "modules": 42, "moves": 130, "round trips": 6},
    "failing retry": {"calls": 320, "modules": 45, "moves": 149, "round trips": 8},
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
