"""A thread that handles items when they are due: each at its time, and never one that was removed."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from operator import attrgetter

from exactly_once.process.clock import monotonic
from exactly_once.process.deadlines import Deadlines
from tests.support.deliveries import A_WHILE


@dataclass(eq=False)
class Timed:
    at: float
    handled: threading.Event = field(default_factory=threading.Event)


def deadlines():
    """Items that are handled once."""

    def handle(due):
        for one in due:
            one.at = inf
            one.handled.set()

    return Deadlines("tests", attrgetter("at"), handle)


def test_an_item_is_handled_when_it_is_due_and_no_other_before():
    timed, later, soon = deadlines(), Timed(monotonic() + 3600), Timed(monotonic() + 0.05)

    timed.add(later)
    timed.add(soon)

    assert soon.handled.wait(A_WHILE)
    assert not later.handled.is_set()


def test_an_item_that_was_removed_is_not_handled():
    timed, removed, last = deadlines(), Timed(monotonic() + 0.05), Timed(monotonic() + 0.1)

    timed.add(removed)
    timed.remove(removed)
    timed.add(last)

    assert last.handled.wait(A_WHILE)
    assert not removed.handled.is_set()


def test_items_that_become_due_earlier_are_handled_then():
    timed, items = deadlines(), [Timed(inf), Timed(monotonic() + 3600)]
    for item in items:
        timed.add(item)

    timed.hasten(lambda item: setattr(item, "at", 0.0))

    assert all(item.handled.wait(A_WHILE) for item in items)


def test_items_are_handled_again_at_their_next_time():
    times, third = [], threading.Event()

    def handle(due):
        for one in due:
            times.append(monotonic())
            one.at = monotonic() + 0.02
            if len(times) == 3:
                third.set()

    timed = Deadlines("tests", attrgetter("at"), handle)
    item = Timed(0.0)
    timed.add(item)

    assert third.wait(A_WHILE)
    timed.remove(item)
    assert all(later - earlier >= 0.02 for earlier, later in pairwise(times))
