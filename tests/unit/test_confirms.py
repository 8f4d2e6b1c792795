"""A confirm is credited to the publish that its tag names, in any order of the answers and with any repetition."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from exactly_once.transport.interface import PublishOutcome
from outbox.transports.confirms import ConfirmTracker


def sent(*positions):
    tracker = ConfirmTracker()
    for position in positions:
        tracker.sent(position, f"m{position}")
    return tracker


def outcomes(tracker):
    return {position: verdict.outcome for position, verdict in tracker.collect().items()}


def test_confirmed_messages_are_forgotten_while_others_are_open():
    tracker = sent(70, 80)

    tracker.acked(1, False)
    tracker.returned("m70", "unroutable")  # unknown now
    tracker.sent(70, "m70")
    tracker.acked(3, False)

    assert outcomes(tracker) == {70: PublishOutcome.CONFIRMED}


def test_message_sent_again_at_another_position_is_returned_although_its_first_publish_was_acked():
    """A failover may give it another position."""
    tracker = sent(70)
    tracker.sent(80, "m70")

    tracker.acked(1, False)
    tracker.returned("m70", "unroutable")
    tracker.acked(2, False)

    assert outcomes(tracker) == {70: PublishOutcome.CONFIRMED, 80: PublishOutcome.RETURNED}


class TrackerAgainstModel(RuleBasedStateMachine):
    """The model is one plain list of publishes, and the specification applied to each of them."""

    def __init__(self):
        super().__init__()
        self.tracker = ConfirmTracker()
        self.answers = []  # by tag - 1: None while open, else the outcome
        self.was_returned = []
        self.collected = {}
        self.expected = {}

    @rule()
    def publish(self):
        self.answers.append(None)
        self.was_returned.append(False)
        self.tracker.sent(len(self.answers), f"m{len(self.answers)}")

    @rule(tag=st.integers(0, 30), multiple=st.booleans())
    def ack(self, tag, multiple):
        self.tracker.acked(tag, multiple)
        for number in self._named(tag, multiple):
            self._answer(number, PublishOutcome.RETURNED if self.was_returned[number - 1] else PublishOutcome.CONFIRMED)

    @rule(tag=st.integers(0, 30), multiple=st.booleans())
    def nack(self, tag, multiple):
        self.tracker.nacked(tag, multiple)
        for number in self._named(tag, multiple):
            self._answer(number, PublishOutcome.NACKED)

    @precondition(lambda self: None in self.answers)
    @rule(data=st.data())
    def return_message(self, data):
        """A broker returns a message before it answers for it."""
        number = data.draw(st.sampled_from([n for n, answer in enumerate(self.answers, 1) if answer is None]))
        self.tracker.returned(f"m{number}", "unroutable")
        self.was_returned[number - 1] = True

    @rule()
    def return_an_unknown_message(self):
        self.tracker.returned("never sent", "unroutable")

    @rule()
    def collect(self):
        verdicts = self.tracker.collect()
        assert not verdicts.keys() & self.collected.keys()
        self.collected.update({position: verdict.outcome for position, verdict in verdicts.items()})
        assert self.collected == self.expected

    @invariant()
    def waits_for_exactly_the_open_ones(self):
        assert self.tracker.waiting == (None in self.answers)

    def teardown(self):
        self.collect()

    def _named(self, tag, multiple):
        numbers = range(1, len(self.answers) + 1)
        named = (lambda number: tag == 0 or number <= tag) if multiple else (lambda number: number == tag)
        return [number for number in numbers if named(number) and self.answers[number - 1] is None]

    def _answer(self, number, outcome):
        self.answers[number - 1] = self.expected[number] = outcome


TestConfirmTrackerAgainstAModel = pytest.mark.long(TrackerAgainstModel.TestCase)
TestConfirmTrackerAgainstAModel.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
