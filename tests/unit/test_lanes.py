"""What a worker gets from a lane: how many deliveries at a time, when, and which of them must not be taken."""

from datetime import timedelta

import kombu
import pytest

from inbox import Batch, Ordered, Shed
from inbox.conf import InboxOptions
from inbox.consumer import lanes
from inbox.consumer.answers import Acks, Delivery
from inbox.consumer.lanes import CHECKED_AT_ONCE, LOAD_BYTES, STORED_AT_ONCE, Lane, prefetch_of, size_of
from inbox.handlers.handler import Handler
from inbox.handlers.kinds import Group, Pulled
from inbox.limits import shedder
from inbox.limits.shedder import shedder_of
from inbox.limits.slots import slots_of

NEVER = float("inf")


def a_handler(**options):
    return Handler(name="tests.lane", topics=("t",), function=print, biz_id=None, using="default", **options)


def a_delivery(handler, number, *, at=0.0, acks=None):
    return Delivery(
        Acks(None, multiple=True) if acks is None else acks, handler, kombu.Message(body=b"", delivery_tag=number), at
    )


def a_lane(count=0, *, at=0.0, **options):
    lane = Lane(a_handler(**options))
    put(lane, *range(count), at=at)
    return lane


def put(lane, *numbers, at=0.0, acks=None):
    for number in numbers:
        lane.put(a_delivery(lane.handler, number, at=at, acks=acks))


def numbers(load):
    return [delivery.message.delivery_tag for delivery in load]


class TestPlainHandler:
    def test_an_empty_lane_is_never_due_and_a_filled_lane_is_due_at_once(self):
        lane = a_lane()

        assert lane.seconds_left(0.0) == NEVER
        put(lane, 1)
        assert lane.seconds_left(0.0) == 0


def test_group_commit_takes_what_is_available_without_waiting():
    lane = a_lane(7, kind=Group(size=5))

    assert not lane.is_filling
    assert [numbers(lane.take(0.0)) for _ in range(3)] == [[0, 1, 2, 3, 4], [5, 6], []]


class TestBatch:
    def test_an_incomplete_batch_is_taken_after_the_wait_of_its_oldest_delivery(self):
        lane = a_lane(1, kind=Batch(size=3, wait=timedelta(seconds=10)), at=100.0)
        put(lane, 1, at=109.0)

        assert (lane.take(109.0), lane.seconds_left(109.0)) == ([], 1.0)
        assert lane.seconds_left(110.0) == 0
        assert numbers(lane.take(110.0)) == [0, 1]

    def test_only_a_delivery_between_the_first_and_the_last_of_a_batch_needs_no_worker(self):
        lane, filling = a_lane(kind=Batch(size=4)), []
        for number in range(5):
            put(lane, number)
            filling.append(lane.is_filling)

        assert filling == [False, True, True, False, False]


class TestOrderedHandler:
    def test_an_ordered_load_is_limited_in_size(self):
        lane = a_lane(STORED_AT_ONCE + 5, ordered=Ordered())

        assert len(lane.take(0.0)) == STORED_AT_ONCE

    def test_a_rate_limit_does_not_limit_the_load_of_an_ordered_lane(self):
        lane = a_lane(50, ordered=Ordered(), rate_limit=1 / 3600)

        assert len(lane.take(0.0)) == 50

    def test_taking_nothing_does_not_block_an_ordered_lane(self):
        lane = a_lane(ordered=Ordered())
        lane.take(0.0)
        put(lane, 1)

        assert numbers(lane.take(0.0)) == [1]


class Tokens:
    """A limiter that has `tokens` tokens."""

    def __init__(self, tokens):
        self.tokens = tokens

    def take(self, most):
        taken = min(most, self.tokens)
        self.tokens -= taken
        return taken

    def wait_seconds(self):
        return 0.0 if self.tokens else 7.0


class TestRateLimit:
    @pytest.fixture
    def tokens(self, monkeypatch):
        tokens = Tokens(3)
        monkeypatch.setattr(lanes, "limiter_of", lambda handler: tokens)
        return tokens

    def test_a_load_takes_no_more_deliveries_than_there_are_tokens(self, tokens):
        lane = a_lane(10, kind=Group(size=5), rate_limit=1.0)

        assert numbers(lane.take(0.0)) == [0, 1, 2]
        assert (lane.take(0.0), lane.seconds_left(0.0)) == ([], 7.0)
        tokens.tokens = 9
        assert numbers(lane.take(0.0)) == [3, 4, 5, 6, 7]
        assert tokens.tokens == 4

    def test_a_batch_that_is_not_due_takes_no_tokens(self, tokens):
        lane = a_lane(2, kind=Batch(size=5, wait=timedelta(seconds=10)), rate_limit=1.0)

        assert (lane.take(1.0), tokens.tokens) == ([], 3)
        assert lane.seconds_left(1.0) == 9.0

    def test_a_rate_limited_batch_waits_for_both_its_batch_and_its_tokens(self, tokens):
        tokens.tokens = 0
        lane = a_lane(2, kind=Batch(size=5, wait=timedelta(seconds=5)), rate_limit=1.0)

        assert lane.seconds_left(0.0) == 7.0


@pytest.fixture(autouse=True)
def _queue_readings_do_not_expire(monkeypatch):
    monkeypatch.setattr(shedder, "_READING_VALID_SECONDS", 3600.0)


class TestShedding:
    @pytest.fixture
    def shedding(self):
        lane = a_lane(CHECKED_AT_ONCE + 5, shed=Shed(above=10))
        shedder = shedder_of(lane.handler)
        shedder.record_lag(100)
        yield lane
        shedder.record_lag(0)

    def test_while_shedding_only_messages_checked_and_kept_are_taken(self, shedding):
        assert (shedding.take(0.0), shedding.seconds_left(0.0)) == ([], NEVER)

        sifted = shedding.take_to_check(0.0)
        assert numbers(sifted) == list(range(CHECKED_AT_ONCE))
        shedding.put_checked(sifted[3:5])
        assert [numbers(shedding.take(0.0)) for _ in range(3)] == [[3], [4], []]

    def test_kept_deliveries_are_taken_first_after_shedding_ends(self, shedding):
        shedding.put_checked(shedding.take_to_check(0.0)[7:8])
        shedder_of(shedding.handler).record_lag(0)

        assert shedding.take_to_check(0.0) == []
        assert [numbers(shedding.take(0.0)) for _ in range(2)] == [[7], [CHECKED_AT_ONCE]]


class TestEndedChannels:
    def test_deliveries_of_an_ended_channel_are_dropped(self):
        lane, ended = a_lane(), Acks(None, multiple=True)
        put(lane, 0, 1, acks=ended)
        put(lane, 2, 3)

        ended.is_open = False

        assert lane.drop_ended() == 2
        assert [numbers(lane.take(0.0)) for _ in range(3)] == [[2], [3], []]

    def test_unfinished_load_of_an_ended_channel_is_not_taken_again(self):
        lane, ended = a_lane(), Acks(None, multiple=True)
        put(lane, 0, acks=ended)
        load = lane.take(0.0)

        ended.is_open = False
        lane.put_back(load, 10.0, backoff=0.0)

        assert len(lane) == 0


class TestUndecidedDeliveries:
    def test_an_undecided_load_is_retried_by_one_worker_until_a_delivery_is_done(self):
        lane = a_lane(5)
        lane.put_back(lane.take(0.0), 10.0, backoff=2.0)

        assert [numbers(lane.take(12.0)) for _ in range(2)] == [[0], []]
        assert numbers(lane.take(14.0)) == [1]
        lane.done()
        assert [numbers(lane.take(14.0)) for _ in range(2)] == [[2], [3]]

    def test_an_undecided_load_is_not_sifted_during_its_backoff(self):
        lane = a_lane(5, shed=Shed(above=1))
        shedder_of(lane.handler).record_lag(100)

        lane.put_back(lane.take_to_check(0.0), 10.0, backoff=2.0)

        assert lane.take_to_check(11.0) == []
        assert numbers(lane.take_to_check(12.0)) == [0, 1, 2, 3, 4]


class TestStaleDeliveries:
    def test_stale_deliveries_are_removed_oldest_first(self):
        lane = a_lane(2, at=1.0)
        put(lane, 2, at=5.0)

        assert numbers(lane.stale(5.0, 6.0)) == [0, 1]
        assert numbers(lane.take(9.0)) == [2]

    def test_stale_deliveries_of_clients_are_removed(self):
        """They are stored in any case. The threads may all be busy with other handlers until the broker closes the channel."""
        lane = a_lane(2, kind=Pulled())
        assert numbers(lane.stale(5.0, 6.0)) == [0, 1]

    def test_stale_deliveries_stay_in_an_ordered_lane(self):
        lane = a_lane(2, ordered=Ordered())

        assert lane.stale(100.0, 100.0) == []
        assert len(lane) == 2


class TestConcurrency:
    def test_a_lane_whose_tokens_another_thread_has_taken_takes_no_slot(self, monkeypatch):
        monkeypatch.setattr(Tokens, "wait_seconds", lambda tokens: 0.0)
        monkeypatch.setattr(lanes, "limiter_of", lambda handler: Tokens(0))
        lane = a_lane(1, concurrency=1, rate_limit=1.0)

        assert lane.take(0.0) == []
        assert slots_of(lane.handler).is_free

    def test_taking_in_for_an_ordered_handler_takes_no_slot(self):
        lane = a_lane(3, concurrency=1, ordered=Ordered())
        slots = slots_of(lane.handler)
        assert slots.take()

        assert numbers(lane.take(0.0)) == [0, 1, 2]
        slots.leave()


class TestPrefetch:
    @pytest.mark.parametrize(
        ("given", "size", "prefetch"),
        [
            ({}, 1, 50),
            ({"kind": Batch(size=20)}, 20, 50),
            ({"kind": Batch(size=100)}, 100, 200),
            ({"kind": Group(size=50)}, 50, 100),
            ({"ordered": Ordered()}, STORED_AT_ONCE, 2 * STORED_AT_ONCE),
            ({"rate_limit": 2000.0}, 1, 50),
            ({"rate_limit": 5.0}, 1, 10),
            ({"rate_limit": 1 / 3600}, 1, 1),
            ({"rate_limit": 5.0, "kind": Batch(size=30)}, 30, 60),
        ],
        ids=str,
    )
    def test_prefetch_is_at_least_two_loads_and_is_reduced_by_a_rate_limit(self, given, size, prefetch):
        handler = a_handler(**given)

        assert (size_of(handler), prefetch_of(handler, InboxOptions())) == (size, prefetch)

    def test_fewer_deliveries_of_an_ordered_handler_are_fetched_if_prefetch_is_lower(self):
        assert prefetch_of(a_handler(ordered=Ordered()), InboxOptions(PREFETCH=5)) == 20


@pytest.mark.parametrize("options", [{"ordered": Ordered()}, {"kind": Batch(size=10)}, {"kind": Group(size=10)}], ids=str)
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [([LOAD_BYTES // 2] * 4, [[0, 1], [2, 3]]), ([2 * LOAD_BYTES, 1, 2 * LOAD_BYTES], [[0], [1], [2]])],
    ids=["by the size of its bodies", "to a delivery larger than the limit"],
)
def test_a_load_is_limited(options, sizes, expected):
    lane = a_lane(**options)
    for number, size in enumerate(sizes):
        message = kombu.Message(body=bytes(size), delivery_tag=number)
        lane.put(Delivery(Acks(None, multiple=True), lane.handler, message, 0.0))

    loads = []
    lane.wait = 0.0
    while load := lane.take(0.0):
        loads.append(numbers(load))
        lane.done()

    assert loads == expected
