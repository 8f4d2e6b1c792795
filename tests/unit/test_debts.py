"""What is owed to a database that was away: done once, by whoever comes first when it is back, and never forgotten."""

from __future__ import annotations

import sys
import threading

import pytest

from inbox.debts import Debts
from inbox.transactions import DatabaseAway
from tests.support.deliveries import at_once


def away(owed=None):
    error = DatabaseAway("gone")
    error.owed = owed
    return error


@pytest.fixture
def _many_switches():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_it_is_done_once_on_its_own_database():
    debts, done = Debts(), []
    debts.add("here", away(lambda: done.append("here")))
    debts.add("there", away(lambda: done.append("there")))
    debts.add("here", away())

    debts.settle("here")
    debts.settle("here")

    assert done == ["here"]


def test_it_stays_owed_while_the_database_is_away():
    debts, done, is_away = Debts(), [], True

    def give_back(name):
        if is_away:
            raise away()
        done.append(name)

    for name in "ab":
        debts.add("here", away(lambda name=name: give_back(name)))
    with pytest.raises(DatabaseAway):
        debts.settle("here")
    is_away = False
    debts.settle("here")

    assert done == ["a", "b"]


def test_what_cannot_be_done_is_told_of_and_holds_up_nothing(caplog):
    debts, done = Debts(), []
    debts.add("here", away(lambda: 1 / 0))
    debts.add("here", away(lambda: done.append("next")))

    debts.settle("here")

    assert done == ["next"]
    assert "cannot be given back" in caplog.text


@pytest.mark.usefixtures("_many_switches")
def test_many_threads_forget_none():
    debts, done, lock = Debts(), [], threading.Lock()
    first_try = set(range(400))

    def give_back(number):
        with lock:
            if number in first_try:
                first_try.remove(number)
                raise away()
            done.append(number)

    def owe(first):
        for number in range(first, first + 100):
            debts.add("here", away(lambda number=number: give_back(number)))
            try:
                debts.settle("here")
            except DatabaseAway:
                debts.settle("there")

    at_once([lambda first=first: owe(first) for first in range(0, 400, 100)])
    while len(done) < 400:
        try:
            debts.settle("here")
        except DatabaseAway:
            continue

    assert sorted(done) == list(range(400))
