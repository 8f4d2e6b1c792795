"""A floor is below everything that may still become ready; now and then a look begins at the very start all the same."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outbox.relay.floors import Floors
from outbox.store import Sight

MOVE, FROM_THE_START, PART = 0.5, 2.0, 50
"""Seconds, seconds, and the part of the time that looks from the start may take, as the module promises them."""
SHARDS = (3, 4)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def goes(self, seconds):
        self.now += seconds


def sight(first=None):
    return Sight(busy=(), first=first or {}, rested=False)


class Looking:
    """A relay's floors, and looks at a table on which nobody else is writing unless the test says so."""

    def __init__(self):
        self.clock = Clock()
        self.writers = set()
        self.asked = 0
        self.floors = Floors(SHARDS, self._who_writes, self.clock)

    def _who_writes(self):
        self.asked += 1
        return frozenset(self.writers)

    def looks(self, first=None, *, taking=0.0, after=0.0):
        """One look, `after` so many seconds; was it one from the start?"""
        self.clock.goes(after)
        from_the_start = self.floors.begin()
        self.clock.goes(taking)
        self.floors.end(sight(first))
        return from_the_start

    def reads(self, position, **found):
        """A message at `position`, in a pass between two looks."""
        self.floors.saw(position)
        self.looks(**{"after": MOVE, **found})
        self.looks(found.get("first"))


class TestAFloor:
    def test_is_nowhere_before_anything_was_read(self):
        looking = Looking()
        for _ in range(10):
            looking.looks(after=MOVE)

        assert set(looking.floors.now.values()) <= {0}
        assert not looking.asked, "and nobody is asked who writes"

    def test_is_raised_to_what_was_read_for_all_shards_of_the_relay(self):
        """A shard in which nothing happens has dead rows, too."""
        looking = Looking()
        looking.reads(500)

        assert looking.floors.now == {3: 500, 4: 500}

    def test_is_raised_by_a_look_that_began_when_the_position_had_been_seen(self):
        looking = Looking()
        looking.floors.saw(500)
        looking.looks(after=MOVE)

        assert looking.floors.now == {}

    @pytest.mark.parametrize(("first", "floor"), [({3: 120}, 119), ({3: 500}, 499), ({3: 501}, 500)])
    def test_stays_below_what_a_look_has_found(self, first, floor):
        looking = Looking()
        looking.reads(500, first=first)

        assert looking.floors.now == {3: floor, 4: 500}

    def test_is_not_raised_while_somebody_writes_who_was_writing_when_the_position_was_seen(self):
        looking = Looking()
        looking.writers = {"early", "also early"}
        looking.floors.saw(500)
        looking.looks(after=MOVE)
        looking.writers = {"early", "late"}
        for _ in range(100):
            looking.looks(after=MOVE)
            assert looking.floors.now == {}

        looking.writers = {"late"}
        looking.looks(after=MOVE)
        assert looking.floors.now == {3: 500, 4: 500}

    def test_is_held_back_by_what_the_look_after_their_end_has_found(self):
        looking = Looking()
        looking.writers = {"early"}
        looking.floors.saw(500)
        looking.looks(after=MOVE)
        looking.writers = set()
        looking.looks({4: 33}, after=MOVE)

        assert looking.floors.now == {3: 500, 4: 32}

    def test_takes_one_that_has_ended_once_for_ended(self):
        looking = Looking()
        looking.writers = {"one", "other"}
        looking.floors.saw(500)
        for writers in ({"one", "other"}, {"one"}, {"other"}):
            looking.writers = writers
            looking.looks(after=MOVE)

        assert looking.floors.now == {3: 500, 4: 500}

    def test_follows_what_is_read(self):
        looking = Looking()
        for position in range(100, 1100, 100):
            looking.reads(position)

        assert looking.floors.now == {3: 1000, 4: 1000}

    def test_is_not_pulled_down_by_a_message_that_is_tried_again(self):
        """It lies aside, and may be as old as it likes."""
        looking = Looking()
        looking.reads(500)
        for _ in range(3):
            looking.reads(5)

        assert looking.floors.now == {3: 500, 4: 500}

    def test_falls_when_something_appears_below_it_after_all(self):
        """As with a row that somebody made ready by hand; it is found by a look from the start."""
        looking = Looking()
        looking.reads(500)
        looking.reads(600, first={3: 20})

        assert looking.floors.now == {3: 19, 4: 600}

    def test_costs_a_question_now_and_then_and_not_with_every_look(self):
        looking = Looking()
        looking.writers = {"for ever"}
        for position in range(1, 1001):
            looking.floors.saw(position)
            looking.looks(after=0.01)

        assert looking.asked <= 10 / MOVE + 1


class TestALookFromTheStart:
    def test_is_the_first_and_then_one_every_other_second(self):
        looking = Looking()
        at = [looking.clock.now for _ in range(200) if looking.looks(after=0.1)]

        gaps = [later - earlier for earlier, later in pairwise(at)]
        assert at[0] == 1000.1
        assert len(gaps) >= 5
        assert all(FROM_THE_START <= gap < FROM_THE_START + 0.15 for gap in gaps), gaps

    def test_that_failed_is_made_again(self):
        looking = Looking()
        for _ in range(5):
            looking.clock.goes(0.01)
            assert looking.floors.begin(), "no look has ended yet"

    @given(taking=st.floats(0.0, 30.0), between=st.floats(0.05, 1.0))
    @settings(max_examples=60, deadline=None)
    def test_takes_at_most_its_part_of_the_time(self, taking, between):
        looking = Looking()
        begun_at, spent, count = looking.clock.now, 0.0, 0
        while looking.clock.now - begun_at < 2.2 * PART * max(taking, FROM_THE_START / PART):
            looking.clock.goes(between)
            if looking.floors.begin():
                looking.clock.goes(taking)
                spent += taking
                count += 1
            looking.floors.end(sight())

        assert count >= 2
        # And one more, because the time that is looked at begins with one.
        assert spent <= (looking.clock.now - begun_at) / PART + taking

    def test_is_due_again_by_its_end_and_not_by_its_beginning(self):
        looking = Looking()
        assert looking.looks(taking=10.0)

        assert not looking.looks(after=PART * 10.0 - 1)
        assert looking.looks(after=1.1)


class FloorsAgainstTransactions(RuleBasedStateMachine):
    """Transactions draw positions in any order and commit whenever they like; one relay looks and publishes.

    Whatever they do, nothing ever becomes ready below a floor, so every look sees everything.
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
        self.clock.goes(seconds)

    @rule(data=st.data(), while_it_looks=st.booleans())
    def look_and_publish(self, data, while_it_looks):
        from_the_start = self.floors.begin()
        seen = {row for row in self.ready if from_the_start or row[0] > self.floors.now.get(row[1], 0)}
        if while_it_looks and self.open:
            self.end(data, commits=True)
        self.floors.end(sight({shard: min(at for at, of in seen if of == shard) for shard in {of for _, of in seen}}))
        # Any part of it may have been somebody else's, or have failed.
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


TestFloorsAgainstTransactions = FloorsAgainstTransactions.TestCase
TestFloorsAgainstTransactions.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


class TestADatabaseThatLostItsEnd:
    """After a fail-over or a restore the sequence draws positions once more that were below a floor."""

    def test_is_read_from_its_beginning_after_an_outage(self):
        looking = Looking()
        looking.reads(100)
        assert looking.floors.now == dict.fromkeys(SHARDS, 100)

        looking.floors.forget()

        assert not looking.floors.now

    def test_shows_itself_by_a_message_below_a_floor(self):
        looking = Looking()
        looking.reads(100)

        assert looking.looks({SHARDS[0]: 7}, after=FROM_THE_START)

        assert not looking.floors.now
