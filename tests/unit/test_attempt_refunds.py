"""Refunds of attempts to a database that was unavailable: each is made once, when the database is available again."""

import sys
import threading

import pytest

from inbox.receiving.outages import make_refunds, refund_later
from inbox.transactions.running import DatabaseUnavailable
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
    done = []
    refund_later("here", lambda alias: done.append("here"))
    refund_later("there", lambda alias: done.append("there"))

    make_refunds("here")
    make_refunds("here")

    assert done == ["here"]


def test_a_failing_refund_is_logged_and_does_not_hold_up_the_next_one(caplog):
    done = []
    refund_later("here", lambda alias: 1 / 0)
    refund_later("here", lambda alias: done.append("next"))

    make_refunds("here")

    assert done == ["next"]
    assert "could not be refunded" in caplog.text


@pytest.mark.usefixtures("_frequent_thread_switches")
def test_concurrent_threads_make_each_refund_once_and_lose_none():
    done, lock = [], threading.Lock()
    first_try = set(range(400))

    def refund(number):
        with lock:
            if number in first_try:
                first_try.remove(number)
                raise unavailable()
            done.append(number)

    def add_refunds(first):
        for number in range(first, first + 100):
            refund_later("here", lambda alias, number=number: refund(number))
            try:
                make_refunds("here")
            except DatabaseUnavailable:
                make_refunds("there")

    at_once([lambda first=first: add_refunds(first) for first in range(0, 400, 100)])
    while len(done) < 400:
        try:
            make_refunds("here")
        except DatabaseUnavailable:
            continue

    assert sorted(done) == list(range(400))
