"""A thread that handles items when they are due: also one that is due before those it already waits for."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
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
