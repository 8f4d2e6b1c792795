"""The slots of a handler with a `concurrency`: how many there are, and that deliveries and stored messages take turns."""

import threading
from collections import Counter
from datetime import timedelta

import pytest

from inbox.handlers.handler import Handler
from inbox.limits import slots as slots_module
from inbox.limits.slots import Slots, limited_by_default, occupied, slots_of
from tests.support.deliveries import at_once


def a_handler(name, **options):
    return Handler(name=name, topics=("t",), function=print, biz_id=None, using="default", **options)


@pytest.fixture
def looks():
    """Records that the runner was asked to look."""
    return []


class TestSlots:
    def test_the_runner_that_found_no_slot_looks_again_before_the_next_delivery(self, looks):
        slots = Slots(1)
        slots.take()
        assert not slots.take_for_stored(lambda: looks.append("look"))

        slots.leave()

        assert looks == ["look"]
        assert not slots.take()
        assert slots.take_for_stored(lambda: None)

    def test_deliveries_wait_for_a_moment_only_when_the_runner_cannot_look(self, monkeypatch):
        now = slots_module.monotonic()
        monkeypatch.setattr(slots_module, "monotonic", lambda: now)
        slots = Slots(1)
        slots.take()
        slots.take_for_stored(lambda: None)
        slots.leave()
        assert not slots.take()

        now += 1

        assert slots.take()

    def test_deliveries_are_next_after_a_stored_message_even_when_the_runner_looks_again(self, looks):
        slots = Slots(1)
        slots.take_for_stored(lambda: None)
        slots.begin_stored()
        slots.take_for_stored(lambda: looks.append("look"))

        slots.leave()

        assert looks == ["look"]
        assert slots.take()

    def test_deliveries_go_on_when_the_runner_has_looked_and_found_nothing(self, looks):
        slots = Slots(1)
        slots.take()
        slots.take_for_stored(lambda: looks.append("look"))
        slots.leave()

        slots.take_for_stored(lambda: None)
        slots.give_back()

        assert slots.take()
        slots.leave()
        assert looks == ["look"]

    def test_two_looks_at_once_keep_no_delivery_waiting(self, looks):
        slots = Slots(1)
        slots.take_for_stored(lambda: looks.append("first"))
        assert not slots.take_for_stored(lambda: looks.append("second"))

        slots.give_back()

        assert slots.take()
        assert looks == []

    def test_many_threads_never_have_more_slots_than_there_are(self):
        slots, lock, inside, most = Slots(3), threading.Lock(), Counter(), []

        def work():
            for _ in range(300):
                if slots.take_for_stored(lambda: None):
                    with lock:
                        inside["now"] += 1
                        most.append(inside["now"])
                    with lock:
                        inside["now"] -= 1
                    slots.leave()

        at_once([work] * 8)

        assert max(most) <= 3
        assert [slots.take_for_stored(lambda: None) for _ in range(4)] == [True, True, True, False]


class TestSlotsOfAHandler:
    @pytest.fixture(autouse=True)
    def no_slots_of_other_tests(self, monkeypatch):
        """A consumer of a later test would report the slots that are taken here."""
        monkeypatch.setattr(slots_module, "_slots", {})

    def test_runs_that_began_under_another_concurrency_keep_their_slots(self, looks):
        more, fewer = (a_handler("tests.changed", concurrency=count) for count in (2, 1))

        def begins(handler):
            return slots_of(handler).take_for_stored(lambda: looks.append("poll"))

        assert [begins(handler) for handler in (more, more, fewer, more, fewer)] == [True, True, False, False, False]

        slots_of(more).leave()
        assert not begins(fewer)
        slots_of(more).leave()
        assert [begins(fewer), begins(fewer), begins(more), begins(more)] == [True, False, True, False]

    def test_handler_that_may_use_all_threads_is_reported_when_it_occupies_them(self):
        handlers = [a_handler("tests.everywhere", concurrency=99), a_handler("tests.elsewhere")]
        everywhere, elsewhere = limited_by_default(handlers, 2)

        assert (everywhere.concurrency, elsewhere.concurrency) == (2, 1)
        assert [slots_of(everywhere).take() for _ in range(3)] == [True, True, False]
        assert occupied(timedelta())["tests.everywhere"][0] == 2
