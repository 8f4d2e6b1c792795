"""A topic that the broker refuses is paused, longer each time, and logged once; other topics are not affected."""

import logging

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outbox.relay.breaker import Breakers

REFUSALS, PROBES, FIRST_PAUSE, LONGEST_PAUSE = 20, 5, 1.0, 30.0
"""Copies of the module's constants: an operator sees their effect."""
BAD, GOOD = "bad.topic", "good.topic"


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breakers(clock):
    return Breakers(clock)


def admitted(breakers, topic, wanted=100):
    """How many messages of `topic` one pass may send."""
    breakers.begin()
    return sum(breakers.admits(topic) for _ in range(wanted))


def opened(breakers, topic=BAD):
    breakers.note([], [topic] * REFUSALS)


def warnings(caplog, words):
    return [record for record in caplog.records if record.levelno == logging.WARNING and words in record.getMessage()]


class TestRefusals:
    def test_a_topic_is_paused_by_20_refusals_in_a_row_and_not_before(self, breakers):
        for _ in range(REFUSALS - 1):
            breakers.note([], [BAD])
            assert admitted(breakers, BAD) == 100

        breakers.note([], [BAD])
        assert admitted(breakers, BAD) == 0

    def test_a_fully_refused_batch_pauses_its_topic_at_once(self, breakers):
        breakers.note([], [BAD] * 500)

        assert admitted(breakers, BAD) == 0

    def test_a_paused_topic_does_not_pause_another_topic(self, breakers):
        opened(breakers)

        assert admitted(breakers, GOOD) == 100

    def test_each_success_resets_the_count_of_refusals(self, breakers):
        for _ in range(5):
            breakers.note([], [BAD] * (REFUSALS - 1))
            breakers.note([BAD], [])

        assert admitted(breakers, BAD) == 100

    def test_a_topic_is_not_paused_when_part_of_its_batch_was_accepted(self, breakers):
        """A full queue accepts one message whenever a consumer has acknowledged one."""
        breakers.note([BAD], [BAD] * 499)

        assert admitted(breakers, BAD) == 100

    def test_the_success_of_another_topic_does_not_reset_the_count_of_refusals(self, breakers):
        breakers.note([GOOD] * 300, [BAD] * 10)
        breakers.note([GOOD] * 300, [BAD] * 10)

        assert admitted(breakers, BAD) == 0


class TestPause:
    def test_after_the_pause_each_pass_sends_a_few_probes(self, breakers, clock):
        opened(breakers)
        clock.now += FIRST_PAUSE

        assert admitted(breakers, BAD) == PROBES
        assert admitted(breakers, BAD) == PROBES, "in each pass, until the broker has answered one"

    def test_each_refused_probe_doubles_the_pause_up_to_its_limit(self, breakers, clock):
        opened(breakers)
        pauses = []
        for _ in range(10):
            began = clock.now
            while not admitted(breakers, BAD, 1):
                clock.now += 0.5
            pauses.append(clock.now - began)
            breakers.note([], [BAD])

        assert pauses == [1, 2, 4, 8, 16, 30, 30, 30, 30, 30]

    def test_the_pause_is_not_lengthened_by_passes_without_messages_of_the_topic(self, breakers, clock):
        opened(breakers)
        for _ in range(100):
            breakers.note([GOOD], [])
            breakers.note([], ["other.topic"])
        clock.now += FIRST_PAUSE

        assert admitted(breakers, BAD) == PROBES

    def test_the_first_accepted_probe_ends_the_pause(self, breakers, clock):
        opened(breakers)
        clock.now += FIRST_PAUSE
        assert admitted(breakers, BAD) == PROBES

        breakers.note([BAD], [BAD] * (PROBES - 1))

        assert admitted(breakers, BAD) == 100

    def test_a_pause_after_a_recovery_is_short_again(self, breakers, clock):
        opened(breakers)
        for _ in range(5):
            clock.now += LONGEST_PAUSE
            breakers.note([], [BAD])
        breakers.note([BAD], [])
        opened(breakers)
        clock.now += FIRST_PAUSE

        assert admitted(breakers, BAD) == PROBES


class TestRecall:
    def test_messages_of_a_paused_topic_are_deferred_by_five_to_ten_minutes(self, breakers):
        assert 300 <= breakers.rest().total_seconds() <= 600

    def test_a_few_deferred_messages_are_recalled_once_after_each_pause(self, breakers, clock):
        opened(breakers)
        assert breakers.to_recall() == []

        clock.now += FIRST_PAUSE
        assert breakers.to_recall() == [(BAD, PROBES)]
        breakers.recalled(BAD, PROBES)
        assert breakers.to_recall() == [], "until they have been answered"

        breakers.note([], [BAD] * PROBES)
        assert breakers.to_recall() == []
        clock.now += 2 * FIRST_PAUSE
        assert breakers.to_recall() == [(BAD, PROBES)]

    def test_all_deferred_messages_are_recalled_when_the_topic_is_accepted_again(self, breakers, clock):
        opened(breakers)
        clock.now += FIRST_PAUSE
        breakers.note([BAD], [])

        [(topic, many)] = breakers.to_recall()
        assert (topic, many > PROBES) == (BAD, True)
        breakers.recalled(BAD, many)
        assert breakers.to_recall() == [(BAD, many)], "there may be more"
        breakers.recalled(BAD, 0)
        assert breakers.to_recall() == []

    def test_recall_stops_when_the_topic_is_refused_again(self, breakers, clock):
        """As with a queue that has room only now and then."""
        opened(breakers)
        clock.now += FIRST_PAUSE
        breakers.note([BAD], [])
        opened(breakers)

        assert breakers.to_recall() == []

    def test_a_new_relay_recalls_the_messages_that_an_earlier_relay_deferred(self, breakers):
        breakers.resume([BAD])
        [(topic, _many)] = breakers.to_recall()
        assert topic == BAD

        opened(breakers)
        assert breakers.to_recall() == [], "the topic is still refused"


class TestLog:
    def test_a_breaker_logs_one_warning_when_it_opens_and_one_when_it_closes(self, breakers, clock, caplog):
        for _ in range(3):
            breakers.note([], [BAD] * 10)
        for _ in range(10):
            clock.now += LONGEST_PAUSE
            breakers.note([], [BAD] * PROBES)
        assert len(warnings(caplog, "refused 20 messages of topic 'bad.topic' in a row")) == 1
        assert len(caplog.records) == 1

        breakers.note([BAD], [])
        breakers.note([BAD], [])
        assert len(warnings(caplog, "takes messages of topic 'bad.topic' again")) == 1
        assert len(caplog.records) == 2

    def test_fewer_refusals_than_the_limit_are_not_logged(self, breakers, caplog):
        breakers.note([], [BAD] * (REFUSALS - 1))
        breakers.note([BAD], [])

        assert not caplog.records


class TestForbiddenTopic:
    def test_forbidden_topic_is_paused_at_the_first_refusal(self, breakers):
        breakers.forbid(BAD, "ACCESS_REFUSED")

        assert admitted(breakers, BAD) == 0
        assert admitted(breakers, GOOD) == 100

    def test_forbidden_topic_is_probed_with_one_message(self, breakers, clock):
        breakers.forbid(BAD, "ACCESS_REFUSED")
        clock.now += FIRST_PAUSE

        assert breakers.to_recall() == [(BAD, 1)]
        assert admitted(breakers, BAD) == 1
        assert breakers.forbids(BAD), "so that the relay sends it alone"

    def test_topic_that_is_permitted_again_is_no_longer_forbidden(self, breakers, clock):
        breakers.forbid(BAD, "ACCESS_REFUSED")
        clock.now += FIRST_PAUSE
        breakers.note([BAD], [])

        assert not breakers.forbids(BAD)
        assert admitted(breakers, BAD) == 100

    def test_topic_that_is_permitted_and_has_no_queue_is_paused_as_any_refused_topic(self, breakers, clock):
        breakers.forbid(BAD, "ACCESS_REFUSED")
        clock.now += FIRST_PAUSE
        breakers.note([], [BAD])
        clock.now += 2 * FIRST_PAUSE

        assert not breakers.forbids(BAD)
        assert admitted(breakers, BAD) == PROBES

    def test_forbidden_topic_is_reported_once_by_all_lanes_of_a_process(self, breakers, clock, caplog):
        beside = Breakers(clock)
        breakers.beside, beside.beside = [beside], [breakers]

        for lane in (breakers, beside, breakers, beside):
            lane.forbid(BAD, "ACCESS_REFUSED - access to topic refused")
            clock.now += LONGEST_PAUSE

        [report] = caplog.records
        assert "set_topic_permissions" in report.getMessage()
        assert "ACCESS_REFUSED" in report.getMessage()

    def test_topic_that_becomes_forbidden_while_it_is_paused_is_reported(self, breakers, caplog):
        opened(breakers)
        breakers.forbid(BAD, "ACCESS_REFUSED")

        assert len(warnings(caplog, "the broker forbids it")) == 1


class BreakersAgainstModel(RuleBasedStateMachine):
    """The specification of one topic's breaker as a plain model, for two topics at the same time."""

    TOPICS = (BAD, GOOD)

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.breakers = Breakers(self.clock)
        self.in_a_row = dict.fromkeys(self.TOPICS, 0)
        self.pause = dict.fromkeys(self.TOPICS, 0.0)
        self.until = dict.fromkeys(self.TOPICS, 0.0)

    @rule(seconds=st.sampled_from([0.05, 0.5, 1.0, 3.0, 61.0]))
    def time_passes(self, seconds):
        self.clock.now += seconds

    @rule(
        accepted=st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 3)),
        refused=st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 25)),
    )
    def a_pass_ends(self, accepted, refused):
        self.breakers.note(
            [topic for topic, count in accepted.items() for _ in range(count)],
            [topic for topic, count in refused.items() for _ in range(count)],
        )
        for topic in self.TOPICS:
            if topic in accepted:
                self.in_a_row[topic], self.pause[topic] = 0, 0.0
            elif topic in refused:
                self.in_a_row[topic] += refused[topic]
                if self.in_a_row[topic] >= REFUSALS:
                    self.pause[topic] = min(max(2 * self.pause[topic], FIRST_PAUSE), LONGEST_PAUSE)
                    self.until[topic] = self.clock.now + self.pause[topic]

    @invariant()
    def admits_as_many_as_the_model_predicts(self):
        for topic in self.TOPICS:
            paused = bool(self.pause[topic])
            expected = 30 if not paused else PROBES if self.clock.now >= self.until[topic] else 0
            assert admitted(self.breakers, topic, 30) == expected


TestBreakersAgainstAModel = BreakersAgainstModel.TestCase
TestBreakersAgainstAModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
