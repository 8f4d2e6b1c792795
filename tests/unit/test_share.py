"""Relays that do not communicate end up with equal shares, and a single relay takes all shards."""

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.models import SHARDS
from outbox.relay.pass_size import Share
from outbox.store.looking import BusyShard

ALL = [BusyShard(shard, 0) for shard in range(SHARDS)]


@pytest.fixture(autouse=True)
def fixed_random_seed():
    random.seed(20_261_121)


class Simulated:
    """Relays on one table whose shards always have work, in milliseconds of a simulated clock.

    A relay finds work, locks the shards that it can, holds them for a pass and releases them. Without any, it waits a moment.
    """

    LOOK, PASS, BACKOFF = 2.0, 25.0, 5.0

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
        """How many shards each relay held on average."""
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
        wanted = {one.shard for one in self.shares[number].of(ALL)}
        self.shares[number].record(len(wanted & others))
        self.held[number] = wanted - others
        if self.held[number]:
            took = self._after(self.PASS, number)
            self.done[number] += took * len(self.held[number])
            self.at_work[number] += took
        else:
            self._after(self.BACKOFF + self.LOOK, number)

    def _after(self, milliseconds, number):
        milliseconds *= random.uniform(0.8, 1.2)
        heapq.heappush(self.events, (self.now + milliseconds, number))
        return milliseconds


def test_a_single_relay_takes_all_shards_from_its_first_pass_on():
    share = Share(SHARDS)

    for _ in range(5):
        assert {one.shard for one in share.of(ALL)} == set(range(SHARDS))
        share.record(0)


@pytest.mark.parametrize("relays", [2, 3, 4, 5])
def test_several_relays_get_equal_shares_and_work_at_the_same_time(relays):
    """Relays that take turns in holding all shards also have equal shares, but do not work at the same time."""
    simulated = Simulated(relays)
    simulated.runs(seconds=5)

    parts = simulated.runs(seconds=30)

    fair = sum(parts) / relays
    assert all(0.8 * fair < part < 1.2 * fair for part in parts), parts
    assert min(parts) > 4, "a relay is down to the minimum"
    most = 30_000 * Simulated.PASS / (Simulated.PASS + Simulated.LOOK)
    assert all(time > 0.9 * most for time in simulated.at_work.values()), simulated.at_work


@pytest.mark.parametrize("relays", [1, 2, 4])
def test_a_new_relay_gets_its_share_within_seconds(relays):
    simulated = Simulated(relays)
    simulated.runs(seconds=5)

    newcomer = simulated.joins()
    simulated.runs(seconds=2)

    parts = simulated.runs(seconds=10)
    fair = sum(parts) / (relays + 1)
    assert 0.75 * fair < parts[newcomer] < 1.25 * fair, parts


def test_the_remaining_relay_takes_over_the_shards_of_one_that_left():
    simulated = Simulated(2)
    simulated.runs(seconds=5)

    simulated.leaves(1)
    simulated.runs(seconds=1)

    used = Simulated.PASS / (Simulated.PASS + Simulated.LOOK)
    assert simulated.runs(seconds=10) == pytest.approx([used * SHARDS, 0], rel=0.05)


@given(refused=st.lists(st.integers(0, SHARDS), max_size=50), shards=st.integers(0, SHARDS))
@settings(max_examples=100, deadline=None)
def test_a_relay_tries_only_shards_with_work_and_none_twice(refused, shards):
    share = Share(SHARDS)
    for number in refused:
        share.record(number)

    asked = share.of(ALL[:shards])

    assert set(asked) <= set(ALL[:shards])
    assert len(set(asked)) == len(asked)
    assert bool(asked) == bool(shards)


def test_every_shard_is_tried_sooner_or_later():
    share = Share(SHARDS)
    for _ in range(20):
        share.record(1)

    asked = {one.shard for _ in range(500) for one in share.of(ALL)}

    assert asked == set(range(SHARDS))
