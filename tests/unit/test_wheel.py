"""The timing wheel: an entry is due at its tick, neither earlier nor later, however often the ring turns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.relay.timetable import Timetable, TimingWheel
from outbox.store.scheduling import Upcoming


def ticks_until(wheel, entry):
    ticks = 1
    while entry not in wheel.tick():
        ticks += 1
    return ticks


@pytest.mark.parametrize("ticks", [1, 7, 8, 9, 15, 16, 17, 24, 800])
def test_an_entry_is_due_after_exactly_its_ticks_also_at_multiples_of_the_ring_size(ticks):
    wheel = TimingWheel(8)
    for _ in range(3):
        wheel.tick()
    wheel.put("a", ticks)

    assert ticks_until(wheel, "a") == ticks
    assert "a" not in wheel
    assert not wheel


def test_ticks_to_next_counts_the_ticks_to_the_next_occupied_slot():
    wheel = TimingWheel(4)
    assert wheel.ticks_to_next() is None
    wheel.put("a", 3)
    assert wheel.ticks_to_next() == 3
    wheel.put("far", 5)
    assert wheel.ticks_to_next() == 1, "its rounds are counted down at the next tick"


@pytest.mark.parametrize("ticks", [0, -1])
def test_an_entry_that_is_not_in_the_future_is_refused(ticks):
    with pytest.raises(ValueError, match=f"ticks is {ticks}"):
        TimingWheel(4).put("a", ticks)


@given(
    slots=st.integers(1, 9),
    steps=st.lists(st.one_of(st.tuples(st.integers(0, 5), st.integers(1, 40)), st.just("tick"), st.integers(0, 5))),
)
def test_a_wheel_of_any_size_behaves_like_a_list_of_due_times(slots, steps):
    wheel, now, due = TimingWheel(slots), 0, {}
    for step in [*steps, *["tick"] * 41]:
        match step:
            case "tick":
                now += 1
                expected = {entry for entry, at in due.items() if at == now}
                assert set(wheel.tick()) == expected
                due = {entry: at for entry, at in due.items() if at > now}
            case (entry, ticks):
                wheel.put(entry, ticks)
                due[entry] = now + ticks
            case entry:
                wheel.discard(entry)
                due.pop(entry, None)
        assert len(wheel) == len(due)
        assert all((entry in wheel) == (entry in due) for entry in range(6))
    assert not wheel


def test_the_timetable_forgets_topics_that_have_no_entries(monkeypatch):
    monkeypatch.setattr("outbox.relay.timetable._MANY_TOPICS", 10)
    table = Timetable(slots=8, tick=0.01, now=0.0)
    for number in range(100):
        topic = f"topic-{number}"
        found = [Upcoming(number, topic, "2026-01-01", float(number), "")]
        table.read_on(found, table.offsets([topic]), now=float(number))
        table.advance(float(number))
        table.fired(table.next_due(10), {number})

    assert len(table._read) <= 11
    assert not table._in_hand


@pytest.mark.parametrize("count", [10, 50])
def test_loading_leaves_some_room_and_reads_some_of_more_topics_than_there_is_room_for(monkeypatch, count):
    monkeypatch.setattr("outbox.relay.timetable.OF_ALL_TOPICS", 20)
    table, topics = Timetable(slots=8, tick=0.01, now=0.0), [f"topic-{number}" for number in range(count)]
    offsets = table.offsets(topics)
    loaded = [topic for topic, offset in offsets.items() if offset.limit]
    assert len(loaded) == min(count, 18)

    table.read_on([Upcoming(n, topic, "2026-01-01", 9.0, "") for n, topic in enumerate(topics[:18])], offsets, now=1.0)

    overdue = table.offsets_of_overdue(topics)
    assert sum(offset.limit for offset in overdue.values()) == table.room > 0


def test_positions_passed_a_moment_ago_and_not_seen_are_missing_for_a_quarter_of_a_second():
    def found(*positions):
        return [Upcoming(position, "topic", "2026-01-01", 9.0, "") for position in positions]

    table = Timetable(slots=8, tick=0.01, now=0.0)
    table.take(found(7), now=1.0)
    table.take(found(), now=2.0)
    table.take(found(8, 10, 12), now=2.1)
    assert (table.newest, table.missing) == (12, [9, 11])

    table.take(found(11, 13), now=2.2)
    assert (table.newest, table.missing) == (13, [9])

    table.take(found(), now=2.5)
    assert (table.newest, table.missing) == (13, [])


@pytest.mark.long
def test_no_more_than_two_thousand_positions_are_missing():
    table = Timetable(slots=8, tick=0.01, now=0.0)
    table.take([Upcoming(1_000_000, "topic", "2026-01-01", 9.0, "")], now=0.1)

    assert table.missing == list(range(998_000, 1_000_000))
