"""Messages that are set aside: which of them are tried again, and when; and the broker's late answers."""

import logging

import pytest

from exactly_once.transport.interface import CONFIRMED, OutgoingMessage, PublishOutcome, Verdict
from exactly_once.wire.envelope import Envelope
from outbox.store import set_aside
from outbox.store.set_aside import LONGEST_SKIP_SECONDS, Reason, SetAside

LOST = Verdict(PublishOutcome.UNKNOWN)


@pytest.fixture
def pass_by(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(set_aside, "monotonic", lambda: now[0])

    def leap(seconds):
        now[0] += seconds

    return leap


def held(*positions, at_once=2, reason=Reason.UNWRITABLE):
    aside = SetAside()
    aside.at_once = at_once
    aside.hold(dict.fromkeys(positions, ""), reason)
    return aside


def a_message(position=1, message_id="m1", body=b"{}", **attributes):
    envelope = Envelope(id=message_id, topic="shop.order.placed", biz_id=message_id, body=body, **attributes)
    return OutgoingMessage(position, envelope)


def test_due_rows_are_tried_in_turn_although_some_of_them_are_never_found(pass_by):
    aside = held(*range(6))
    pass_by(2.0)

    tried = [set(range(6)) - set(aside.skipped()) for _ in range(3)]

    assert sorted(map(len, tried)) == [2, 2, 2]
    assert set.union(*tried) == set(range(6))


def test_locked_rows_are_all_read_again_after_a_second_and_then_ever_later(pass_by):
    aside = held(1, 2, 3, at_once=1, reason=Reason.LOCKED)
    for longest in (1.0, 2.0, 4.0, 8.0, 10.0, 10.0):
        pass_by(longest / 2 - 0.01)
        assert len(aside.skipped()) == 3
        pass_by(longest / 2 + 0.01)
        assert aside.skipped() == {}
        aside.hold(dict.fromkeys([1, 2, 3], ""), Reason.LOCKED)


def test_due_row_that_has_not_had_its_turn_is_not_forgotten(pass_by):
    aside = held(1, 2, 3, at_once=1)
    pass_by(10 * LONGEST_SKIP_SECONDS)

    assert len(aside.skipped()) == 2
    assert aside.counts().total() == 3


def test_row_is_forgotten_some_time_after_its_turn_unless_it_is_set_aside_again(pass_by):
    aside = held(1, 2)
    pass_by(2.0)
    aside.skipped()
    aside.hold({2: ""}, Reason.UNWRITABLE)
    pass_by(LONGEST_SKIP_SECONDS)
    aside.skipped()

    assert 1 not in aside
    assert 2 in aside


def test_due_row_of_a_key_that_was_not_tried_is_not_forgotten(pass_by):
    aside = SetAside()
    aside.hold({1: "a", 2: "b"}, Reason.UNWRITABLE)
    pass_by(2.0)
    assert aside.skipped() == {}

    aside.forget_due(keys=["b"])

    assert (1 in aside, 2 in aside) == (True, False)


def test_rows_of_a_key_are_tried_together(pass_by):
    """Each one that is skipped would hold back the others."""
    aside = SetAside()
    aside.at_once = 1
    aside.hold({1: "a"}, Reason.UNWRITABLE)
    pass_by(2.0)
    aside.hold({2: "a", 3: "b"}, Reason.UNWRITABLE)

    assert aside.skipped() == {3: "b"}


def test_awaited_message_is_skipped_until_its_answer_comes_or_cannot_come_any_more(pass_by):
    aside = SetAside()
    aside.expect([a_message(1), a_message(2, "m2")])
    pass_by(10 * LONGEST_SKIP_SECONDS)
    assert [*aside.skipped()] == [1, 2]

    assert aside.answered({1: CONFIRMED, 2: LOST, 3: CONFIRMED}) == ["shop.order.placed"]

    assert aside.skipped() == {}
    for _ in range(2):
        assert aside.answers([a_message(1), a_message(2, "m2")]) == {1: CONFIRMED}, "until it is settled"
    aside.forget([1, 2])
    assert not aside


def test_message_whose_answers_are_lost_is_tried_again_at_once_and_then_ever_later(pass_by):
    """As those of a queue without a leader, each time that a probe of another topic replaces the channel."""
    aside = SetAside()
    for longest in (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        aside.expect([a_message()])
        aside.answered({1: LOST})
        if longest:
            assert aside.skipped() == {1: ""}
            pass_by(longest)
        assert aside.skipped() == {}
        assert aside.answers([a_message()]) == {}


@pytest.mark.parametrize("changed", [{"message_id": "other"}, {"body": b"[]"}, {"key": "a"}, {"replayed": True}])
def test_late_confirm_does_not_confirm_another_message_at_its_position(changed):
    """As after a failover, or after an operator has corrected and restored the message."""
    aside = SetAside()
    aside.expect([a_message()])
    aside.answered({1: CONFIRMED})

    assert aside.answers([a_message(**changed)]) == {}


def test_confirm_of_a_message_that_is_not_read_again_is_logged_and_forgotten(pass_by, caplog):
    """As after a cancel while the confirm was awaited."""
    caplog.set_level(logging.INFO)
    aside = SetAside()
    aside.expect([a_message()])
    aside.answered({1: CONFIRMED})
    pass_by(3600.0)

    assert aside.skipped() == {}

    assert "confirmed message m1 after its deadline, so it is delivered" in caplog.text
    assert aside.answers([a_message()]) == {}
