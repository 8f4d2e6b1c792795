"""A floor is below every row that may still become ready. Occasionally a query starts at the first row nevertheless."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outbox.relay.floors import Floors
from outbox.store.looking import WorkFound
from tests.support.clock import Clock

MOVE, FROM_THE_START, PART = 0.5, 2.0, 50
"""The module's constants: seconds, seconds, and the inverse of the share of time that queries from the start may take."""
SHARDS = (3, 4)


def looked(first=None):
    return WorkFound(shards=(), first=first or {}, retry_in=math.inf)


class LookingRelay:
    """The floors of one relay, which queries a table. No transaction writes to the table unless the test sets `writers`."""

    def __init__(self):
        self.clock = Clock()
        self.writers = set()
        self.queries = 0
        self.floors = Floors(SHARDS, self._writing_transactions, self.clock)

    def _writing_transactions(self):
        self.queries += 1
        return frozenset(self.writers)

    def looks(self, first=None, *, taking=0.0, after=0.0):
        """One query, `after` this many seconds; return whether it starts at the first row."""
        self.clock.now += after
        from_the_start = self.floors.begin()
        self.clock.now += taking
        self.floors.end(looked(first))
        return from_the_start

    def reads(self, position, **found):
        """Read a message at `position`, in a pass between two queries."""
        self.floors.saw(position)
        self.looks(**{"after": MOVE, **found})
        self.looks(found.get("first"))


class TestFloor:
    def test_no_floor_is_set_before_a_message_was_read(self):
        relay = LookingRelay()
        for _ in range(10):
            relay.looks(after=MOVE)

        assert relay.floors.now == {}
        assert relay.queries == 0

    def test_a_floor_is_not_raised_by_the_first_look_after_a_read_but_by_the_next_one(self):
        relay = LookingRelay()
        relay.floors.saw(500)
        relay.looks(after=MOVE)
        assert relay.floors.now == {}

        relay.looks()
        assert relay.floors.now == {3: 500, 4: 500}

    @pytest.mark.parametrize(("first", "floor"), [({3: 120}, 119), ({3: 500}, 499), ({3: 501}, 500)])
    def test_a_floor_stays_below_the_first_row_that_the_look_found(self, first, floor):
        relay = LookingRelay()
        relay.reads(500, first=first)

        assert relay.floors.now == {3: floor, 4: 500}

    def test_a_transaction_that_was_seen_ended_does_not_hold_back_the_floor_again(self):
        relay = LookingRelay()
        relay.writers = {"one", "other"}
        relay.floors.saw(500)
        for writers in ({"one", "other"}, {"one"}, {"other"}):
            relay.writers = writers
            relay.looks(after=MOVE)

        assert relay.floors.now == {3: 500, 4: 500}

    def test_a_floor_does_not_fall_when_a_lower_position_is_read(self):
        relay = LookingRelay()
        relay.reads(500)
        for _ in range(3):
            relay.reads(5)

        assert relay.floors.now == {3: 500, 4: 500}

    def test_a_floor_falls_when_a_look_finds_a_row_below_it(self):
        """Such as a row that an operator made ready by hand; a query from the start finds it."""
        relay = LookingRelay()
        relay.reads(500)
        relay.reads(600, first={3: 20})

        assert relay.floors.now == {3: 19, 4: 600}

    def test_open_transactions_are_queried_at_intervals_and_not_with_every_look(self):
        relay = LookingRelay()
        relay.writers = {"long transaction"}
        for position in range(1, 1001):
            relay.floors.saw(position)
            relay.looks(after=0.01)

        assert 10 / MOVE - 2 <= relay.queries <= 10 / MOVE + 1


class TestLookFromTheStart:
    def test_the_first_look_and_then_one_every_two_seconds_begin_at_the_start(self):
        relay = LookingRelay()
        at = [relay.clock.now for _ in range(200) if relay.looks(after=0.1)]

        gaps = [later - earlier for earlier, later in pairwise(at)]
        assert at[0] == 1000.1
        assert len(gaps) >= 5
        assert all(FROM_THE_START <= gap < FROM_THE_START + 0.15 for gap in gaps), gaps

    def test_a_look_from_the_start_that_failed_is_repeated(self):
        relay = LookingRelay()
        for _ in range(5):
            relay.clock.now += 0.01
            assert relay.floors.begin(), "no look has ended yet"

    @pytest.mark.long
    @given(taking=st.floats(0.0, 30.0), between=st.floats(0.05, 1.0))
    @settings(max_examples=60, deadline=None)
    def test_looks_from_the_start_take_at_most_a_fiftieth_of_the_time(self, taking, between):
        relay = LookingRelay()
        begun_at, spent, count = relay.clock.now, 0.0, 0
        while relay.clock.now - begun_at < 2.2 * PART * max(taking, FROM_THE_START / PART):
            relay.clock.now += between
            if relay.floors.begin():
                relay.clock.now += taking
                spent += taking
                count += 1
            relay.floors.end(looked())

        assert count >= 2
        # And one more, because the time that is looked at begins with one.
        assert spent <= (relay.clock.now - begun_at) / PART + taking


class FloorsAgainstTransactions(RuleBasedStateMachine):
    """Transactions draw positions in any order and commit at any time; one relay queries and publishes.

    No row becomes ready below a floor, so every query finds all ready rows.
    """

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.floors = Floors(SHARDS, lambda: frozenset(self.open), self.clock)
        self.next_position, self.transactions = 1, 0
        self.open = {}  # by the name of a transaction that has begun to write: its rows
        self.ready = set()  # (position, shard)

    @rule(shard=st.sampled_from(SHARDS))
    def begin(self, shard):
        self.transactions += 1
        self.open[f"transaction {self.transactions}"] = [(self.next_position, shard)]
        self.next_position += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data(), shard=st.sampled_from(SHARDS))
    def write(self, data, shard):
        self.open[data.draw(st.sampled_from(sorted(self.open)))].append((self.next_position, shard))
        self.next_position += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data(), commits=st.booleans())
    def end(self, data, commits):
        rows = self.open.pop(data.draw(st.sampled_from(sorted(self.open))))
        self.ready.update(rows if commits else ())

    @rule(seconds=st.sampled_from([0.01, MOVE, 1.0]))
    def time_passes(self, seconds):
        self.clock.now += seconds

    @rule(data=st.data(), while_it_looks=st.booleans())
    def look_and_publish(self, data, while_it_looks):
        from_the_start = self.floors.begin()
        seen = {row for row in self.ready if from_the_start or row[0] > self.floors.now.get(row[1], 0)}
        if while_it_looks and self.open:
            self.end(data, commits=True)
        self.floors.end(looked({shard: min(at for at, of in seen if of == shard) for shard in {of for _, of in seen}}))
        # Another relay may have taken any part of it, or it may have failed.
        taken = data.draw(st.sets(st.sampled_from(sorted(seen)))) if seen else set()
        for position, _ in taken:
            self.floors.saw(position)
        self.ready -= taken

    @invariant()
    def nothing_is_ready_below_a_floor(self):
        assert not [row for row in self.ready if row[0] <= self.floors.now.get(row[1], 0)]

    @invariant()
    def nothing_can_become_ready_below_a_floor(self):
        rows = [row for rows in self.open.values() for row in rows]
        assert not [row for row in rows if row[0] <= self.floors.now.get(row[1], 0)]


TestFloorsAgainstTransactions = pytest.mark.long(FloorsAgainstTransactions.TestCase)
TestFloorsAgainstTransactions.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


class TestFloorsAfterAFailover:
    """After a failover or a restore the sequence issues positions again that were below a floor."""

    def test_forget_clears_all_floors_after_an_outage(self):
        relay = LookingRelay()
        relay.reads(100)
        assert relay.floors.now == dict.fromkeys(SHARDS, 100)

        relay.floors.forget()

        assert not relay.floors.now

    @pytest.mark.long
    def test_a_row_found_below_a_floor_clears_all_floors(self):
        relay = LookingRelay()
        relay.reads(100)

        assert relay.looks({SHARDS[0]: 7}, after=FROM_THE_START)

        assert not relay.floors.now
