"""Relays that know nothing of each other end up with equal parts, and one that is alone has everything."""

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.models import SHARDS
from outbox.relay.share import Share
from outbox.store import Busy

ALL = [Busy(shard, 0) for shard in range(SHARDS)]


@pytest.fixture(autouse=True)
def always_the_same_chances():
    random.seed(20_261_121)


class Simulated:
    """Relays on one table where everything is always busy, in milliseconds of a made-up clock.

    A relay looks, takes what it can, holds it for a pass and lets go; one that found everything taken rests a moment.
    """

    LOOK, PASS, REST = 2.0, 25.0, 5.0

    def __init__(self, relays):
        self.now = 0.0
        self.shares, self.held, self.done, self.at_work, self.events = {}, {}, {}, {}, []
        for _ in range(relays):
            self.joins()

    def joins(self):
        number = len(self.shares)
        self.shares[number], self.held[number] = Share(SHARDS), set()
        self._after(self.LOOK, number)
        return number

    def leaves(self, number):
        self.held[number] = set()
        self.events = [event for event in self.events if event[1] != number]
        heapq.heapify(self.events)

    def runs(self, seconds):
        """How many shards each relay had in hand on average."""
        self.done, self.at_work = dict.fromkeys(self.shares, 0.0), dict.fromkeys(self.shares, 0.0)
        end = self.now + 1000 * seconds
        while self.events and self.events[0][0] < end:
            self.now, number = heapq.heappop(self.events)
            if self.held[number]:
                self.held[number] = set()
                self._after(self.LOOK, number)
            else:
                self._claims(number)
        self.now = end
        return [work / (1000 * seconds) for work in self.done.values()]

    def _claims(self, number):
        others = set().union(*(held for other, held in self.held.items() if other != number))
        wanted = {busy.shard for busy in self.shares[number].of(ALL)}
        self.shares[number].note(len(wanted & others))
        self.held[number] = wanted - others
        if self.held[number]:
            took = self._after(self.PASS, number)
            self.done[number] += took * len(self.held[number])
            self.at_work[number] += took
        else:
            self._after(self.REST + self.LOOK, number)

    def _after(self, span, number):
        span *= random.uniform(0.8, 1.2)
        heapq.heappush(self.events, (self.now + span, number))
        return span


def test_one_alone_takes_everything_from_the_first_pass_on():
    share = Share(SHARDS)

    for _ in range(5):
        assert {busy.shard for busy in share.of(ALL)} == set(range(SHARDS))
        share.note(0)


@pytest.mark.parametrize("relays", [2, 3, 4, 5])
def test_several_have_equal_parts(relays):
    simulated = Simulated(relays)
    simulated.runs(seconds=5)

    parts = simulated.runs(seconds=30)

    fair = sum(parts) / relays
    assert all(0.8 * fair < part < 1.2 * fair for part in parts), parts
    assert min(parts) > 4, "and none of them is down to the least"


@pytest.mark.parametrize("relays", [2, 3, 4, 5])
def test_several_are_at_work_at_the_same_time(relays):
    """Equal parts are no help if they take turns in having everything."""
    simulated = Simulated(relays)
    simulated.runs(seconds=5)
    simulated.runs(seconds=30)

    most = 30_000 * Simulated.PASS / (Simulated.PASS + Simulated.LOOK)
    assert all(time > 0.9 * most for time in simulated.at_work.values()), simulated.at_work


@pytest.mark.parametrize("relays", [1, 2, 4])
def test_a_newcomer_soon_has_its_part(relays):
    simulated = Simulated(relays)
    simulated.runs(seconds=5)

    newcomer = simulated.joins()
    simulated.runs(seconds=2)

    parts = simulated.runs(seconds=10)
    fair = sum(parts) / (relays + 1)
    assert 0.75 * fair < parts[newcomer] < 1.25 * fair, parts


def test_what_one_leaves_goes_to_the_other():
    simulated = Simulated(2)
    simulated.runs(seconds=5)

    simulated.leaves(1)
    simulated.runs(seconds=1)

    used = Simulated.PASS / (Simulated.PASS + Simulated.LOOK)
    assert simulated.runs(seconds=10) == pytest.approx([used * SHARDS, 0], rel=0.05)


def test_it_never_asks_for_nothing():
    share = Share(SHARDS)
    for _ in range(100):
        share.note(SHARDS)

    assert len(share.of(ALL)) >= 1


@given(refused=st.lists(st.integers(0, SHARDS), max_size=50), busy=st.integers(0, SHARDS))
@settings(max_examples=100, deadline=None)
def test_it_asks_for_some_of_what_is_busy_and_for_none_twice(refused, busy):
    share = Share(SHARDS)
    for number in refused:
        share.note(number)

    asked = share.of(ALL[:busy])

    assert set(asked) <= set(ALL[:busy])
    assert len(set(asked)) == len(asked)
    assert bool(asked) == bool(busy)


def test_no_shard_is_always_left_out():
    share = Share(SHARDS)
    for _ in range(20):
        share.note(1)

    asked = {busy.shard for _ in range(500) for busy in share.of(ALL)}

    assert asked == set(range(SHARDS))
