"""What a worker gets from a lane: how much at a time, when, and what must not be taken."""

from __future__ import annotations

from datetime import timedelta

import kombu
import pytest

from inbox import Shed, shedding
from inbox.conf import InboxOptions
from inbox.consumer import lanes
from inbox.consumer.lanes import SIFTED_AT_ONCE, TAKEN_IN_AT_ONCE, Delivery, Lane, prefetch_of, size_of
from inbox.handlers import Handler
from inbox.shedding import shedder_of

NEVER = float("inf")


def a_handler(**options):
    return Handler(name="tests.lane", topic="t", function=print, biz_id=None, using="default", **options)


def a_delivery(handler, number, *, at=0.0, epoch=1):
    return Delivery(epoch, handler, kombu.Message(body=b"", delivery_tag=number), at)


def a_lane(count=0, *, at=0.0, **options):
    handler = a_handler(**options)
    lane = Lane(handler)
    put(lane, *range(count), at=at)
    return lane


def put(lane, *numbers, at=0.0, epoch=1):
    for number in numbers:
        lane.put(a_delivery(lane.handler, number, at=at, epoch=epoch))


def numbers(load):
    return [delivery.message.delivery_tag for delivery in load]


class TestASingleMessageHandler:
    def test_gets_one_at_a_time_in_order(self):
        lane = a_lane(3)

        assert [numbers(lane.take(0.0)) for _ in range(4)] == [[0], [1], [2], []]

    def test_has_nothing_to_wait_for_when_there_is_nothing(self):
        lane = a_lane()

        assert lane.seconds_left(0.0) == NEVER
        put(lane, 1)
        assert lane.seconds_left(0.0) == 0

    def test_is_counted(self):
        lane = a_lane(3)
        lane.take(0.0)

        assert len(lane) == 2


class TestGroupCommit:
    def test_takes_what_there_is_without_waiting(self):
        lane = a_lane(7, group_commit=5)

        assert [numbers(lane.take(0.0)) for _ in range(3)] == [[0, 1, 2, 3, 4], [5, 6], []]


class TestABatch:
    def test_is_taken_at_once_when_it_is_full(self):
        lane = a_lane(5, batch=3)

        assert numbers(lane.take(0.0)) == [0, 1, 2]

    def test_waits_to_be_filled_and_no_longer(self):
        lane = a_lane(2, batch=3, batch_wait=timedelta(seconds=10), at=100.0)

        assert (lane.take(104.0), lane.seconds_left(104.0)) == ([], 6.0)
        assert lane.seconds_left(110.0) == 0
        assert numbers(lane.take(110.0)) == [0, 1]

    def test_waits_since_its_oldest_came(self):
        lane = a_lane(1, batch=3, batch_wait=timedelta(seconds=10), at=100.0)
        put(lane, 1, at=109.0)

        assert numbers(lane.take(110.0)) == [0, 1]

    def test_does_not_wait_in_a_hurry(self):
        lane = a_lane(2, batch=3, batch_wait=timedelta(seconds=10))

        assert lane.seconds_left(0.0, hurry=True) == 0
        assert numbers(lane.take(0.0, hurry=True)) == [0, 1]


class TestAnOrderedHandler:
    def test_has_one_load_in_hand_at_a_time(self):
        lane = a_lane(3, ordered=True)
        assert numbers(lane.take(0.0)) == [0, 1, 2]
        put(lane, 3, 4)

        assert (lane.take(0.0), lane.seconds_left(0.0)) == ([], NEVER)
        lane.done()
        assert numbers(lane.take(0.0)) == [3, 4]

    def test_takes_many_but_not_all(self):
        lane = a_lane(TAKEN_IN_AT_ONCE + 5, ordered=True)

        assert len(lane.take(0.0)) == TAKEN_IN_AT_ONCE

    def test_is_not_limited_where_it_is_only_taken_in(self):
        lane = a_lane(50, ordered=True, rate_limit=1 / 3600)

        assert len(lane.take(0.0)) == 50

    def test_is_not_in_hand_when_there_was_nothing_to_take(self):
        lane = a_lane(ordered=True)
        lane.take(0.0)
        put(lane, 1)

        assert numbers(lane.take(0.0)) == [1]


class Tokens:
    """A limiter with so many tokens."""

    def __init__(self, tokens):
        self.tokens = tokens

    def take(self, most):
        taken = min(most, self.tokens)
        self.tokens -= taken
        return taken

    def wait_seconds(self):
        return 0.0 if self.tokens else 7.0


class TestALimitedHandler:
    @pytest.fixture
    def tokens(self, monkeypatch):
        tokens = Tokens(3)
        monkeypatch.setattr(lanes, "limiter_of", lambda handler: tokens)
        return tokens

    def test_gets_as_many_as_there_are_tokens(self, tokens):
        lane = a_lane(10, group_commit=5, rate_limit=1.0)

        assert numbers(lane.take(0.0)) == [0, 1, 2]
        assert (lane.take(0.0), lane.seconds_left(0.0)) == ([], 7.0)
        tokens.tokens = 9
        assert numbers(lane.take(0.0)) == [3, 4, 5, 6, 7]
        assert tokens.tokens == 4

    def test_of_a_batch_that_is_not_due_takes_no_token(self, tokens):
        lane = a_lane(2, batch=5, batch_wait=timedelta(seconds=10), rate_limit=1.0)

        assert (lane.take(1.0), tokens.tokens) == ([], 3)
        assert lane.seconds_left(1.0) == 9.0

    def test_waits_for_both_its_batch_and_its_tokens(self, tokens):
        tokens.tokens = 0
        lane = a_lane(2, batch=5, batch_wait=timedelta(seconds=5), rate_limit=1.0)

        assert lane.seconds_left(0.0) == 7.0


@pytest.fixture(autouse=True)
def _no_reading_of_a_queue_is_too_old(monkeypatch):
    monkeypatch.setattr(shedding, "_FRESH_SECONDS", 3600.0)


class TestShedding:
    @pytest.fixture
    def shedding(self):
        lane = a_lane(SIFTED_AT_ONCE + 5, shed=Shed(above=10))
        shedder = shedder_of(lane.handler)
        shedder.saw(100)
        yield lane
        shedder.saw(0)

    def test_nothing_is_taken_before_it_was_looked_through(self, shedding):
        assert (shedding.take(0.0), shedding.seconds_left(0.0)) == ([], NEVER)

        sifted = shedding.take_to_sift(0.0)
        assert numbers(sifted) == list(range(SIFTED_AT_ONCE))
        shedding.keep(sifted[3:5])
        assert [numbers(shedding.take(0.0)) for _ in range(3)] == [[3], [4], []]

    def test_what_was_kept_comes_first_when_it_is_over(self, shedding):
        shedding.keep(shedding.take_to_sift(0.0)[7:8])
        shedder_of(shedding.handler).saw(0)

        assert shedding.take_to_sift(0.0) == []
        assert [numbers(shedding.take(0.0)) for _ in range(2)] == [[7], [SIFTED_AT_ONCE]]


class TestWhatIsForgotten:
    def test_comes_from_another_life_of_the_connection(self):
        lane = a_lane(2)
        put(lane, 2, 3, epoch=2)

        lane.drop_others(2)

        assert [numbers(lane.take(0.0)) for _ in range(3)] == [[2], [3], []]


class TestWhatCouldNotBeEnded:
    def test_is_next_in_its_order_after_a_rest(self):
        lane = a_lane(5, ordered=True)
        load = lane.take(0.0)
        put(lane, 5)
        lane.put_back(load[2:], 10.0, rest=2.0)

        assert (lane.take(11.0), lane.seconds_left(11.0)) == ([], 1.0)
        assert numbers(lane.take(12.0)) == [2, 3, 4, 5]

    def test_is_tried_by_one_worker_until_something_is_ended(self):
        lane = a_lane(5)
        lane.put_back(lane.take(0.0), 10.0, rest=2.0)

        assert [numbers(lane.take(12.0)) for _ in range(2)] == [[0], []]
        assert numbers(lane.take(14.0)) == [1]
        lane.done()
        assert [numbers(lane.take(14.0)) for _ in range(2)] == [[2], [3]]

    def test_is_not_looked_through_meanwhile(self):
        lane = a_lane(5, shed=Shed(above=1))
        shedder_of(lane.handler).saw(100)

        lane.put_back(lane.take_to_sift(0.0), 10.0, rest=2.0)

        assert lane.take_to_sift(11.0) == []
        assert numbers(lane.take_to_sift(12.0)) == [0, 1, 2, 3, 4]


class TestWhatHasWaitedTooLong:
    def test_is_taken_out_oldest_first(self):
        lane = a_lane(2, at=1.0)
        put(lane, 2, at=5.0)

        assert numbers(lane.stale(5.0)) == [0, 1]
        assert numbers(lane.take(9.0)) == [2]

    def test_is_left_in_an_order(self):
        lane = a_lane(2, ordered=True)

        assert lane.stale(100.0) == []
        assert len(lane) == 2


class TestHowMuchIsFetched:
    @pytest.mark.parametrize(
        ("given", "size", "prefetch"),
        [
            ({}, 1, 50),
            ({"batch": 20}, 20, 50),
            ({"batch": 100}, 100, 200),
            ({"group_commit": 50}, 50, 100),
            ({"ordered": True}, TAKEN_IN_AT_ONCE, 2 * TAKEN_IN_AT_ONCE),
            ({"rate_limit": 5.0}, 1, 10),
            ({"rate_limit": 1 / 3600}, 1, 1),
            ({"rate_limit": 5.0, "batch": 30}, 30, 60),
        ],
        ids=str,
    )
    def test_is_two_loads_or_what_prefetch_allows(self, given, size, prefetch):
        handler = a_handler(**given)

        assert (size_of(handler), prefetch_of(handler, InboxOptions())) == (size, prefetch)
