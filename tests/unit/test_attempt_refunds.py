"""Refunds of attempts to a database that was unavailable: each is made once, when the database is available again."""

from __future__ import annotations

import sys
import threading

import pytest

from inbox.receiving.attempt_refunds import AttemptRefunds
from inbox.transactions.persistence import DatabaseUnavailable
from tests.support.deliveries import at_once


def unavailable():
    return DatabaseUnavailable("unavailable")


@pytest.fixture
def _frequent_thread_switches():
    """Threads are switched as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_refund_is_made_once_and_only_for_its_own_database():
    refunds, done = AttemptRefunds(), []
    refunds.add("here", lambda: done.append("here"))
    refunds.add("there", lambda: done.append("there"))

    refunds.settle("here")
    refunds.settle("here")

    assert done == ["here"]


def test_refunds_stay_pending_while_the_database_is_unavailable():
    refunds, done, is_unavailable = AttemptRefunds(), [], True

    def refund(name):
        if is_unavailable:
            raise unavailable()
        done.append(name)

    for name in "ab":
        refunds.add("here", lambda name=name: refund(name))
    with pytest.raises(DatabaseUnavailable):
        refunds.settle("here")
    is_unavailable = False
    refunds.settle("here")

    assert done == ["a", "b"]


def test_a_failing_refund_is_logged_and_does_not_hold_up_the_next_one(caplog):
    refunds, done = AttemptRefunds(), []
    refunds.add("here", lambda: 1 / 0)
    refunds.add("here", lambda: done.append("next"))

    refunds.settle("here")

    assert done == ["next"]
    assert "could not be refunded" in caplog.text


@pytest.mark.usefixtures("_frequent_thread_switches")
def test_concurrent_threads_make_each_refund_once_and_lose_none():
    refunds, done, lock = AttemptRefunds(), [], threading.Lock()
    first_try = set(range(400))

    def refund(number):
        with lock:
            if number in first_try:
                first_try.remove(number)
                raise unavailable()
            done.append(number)

    def add_refunds(first):
        for number in range(first, first + 100):
            refunds.add("here", lambda number=number: refund(number))
            try:
                refunds.settle("here")
            except DatabaseUnavailable:
                refunds.settle("there")

    at_once([lambda first=first: add_refunds(first) for first in range(0, 400, 100)])
    while len(done) < 400:
        try:
            refunds.settle("here")
        except DatabaseUnavailable:
            continue

    assert sorted(done) == list(range(400))
