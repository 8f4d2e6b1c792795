"""A topic that the broker refuses is paused after 20 refusals in a row and logged once; other topics are not affected."""

import logging
import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from exactly_once.transport.interface import PublishOutcome, Verdict
from outbox.relay import breaker
from outbox.relay.breaker import PausedTopics
from outbox.store.looking import TopicPause
from tests.support.clock import Clock

REFUSALS, PROBES, FIRST_PAUSE, LONGEST_PAUSE = 20, 5, 1.0, 30.0
"""Copies of the module's constants: an operator sees their effect."""
BAD, GOOD = "bad.topic", "good.topic"
WHY = "the broker refused to keep it"
REFUSED = Verdict(PublishOutcome.NACKED, WHY)
FORBIDDEN = "ACCESS_REFUSED - access to topic refused"


class Store:
    """The stored pauses, without a database."""

    def __init__(self):
        self.paused = {}
        self.prolonged, self.tried, self.resumed = [], [], []
        self.before = WHY

    def pause_refused(self, alias, topic, verdict, seconds, probe_after):
        if topic in self.paused:
            return False
        self.paused[topic] = (verdict.reason, seconds, probe_after.total_seconds())
        return True

    def prolong(self, alias, topic, verdict, longest, next_after):
        self.prolonged.append((topic, verdict.reason, longest))
        return self.before

    def begin_resuming(self, alias, topic):
        return self.paused.pop(topic, None) is not None

    def begin_trial(self, alias, topic, most, next_after, refused):
        self.tried.append((topic, most))
        return most

    def resume_some(self, alias, topic, most, refused):
        self.resumed.append((topic, most))
        return most

    def resume_stranded(self, alias):
        return []


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(breaker, "monotonic", clock)
    return clock


@pytest.fixture
def stored(monkeypatch):
    stored = Store()
    monkeypatch.setattr(breaker, "paused_topics", stored)
    return stored


@pytest.fixture
def topics(clock, stored):
    return PausedTopics("default")


def refuse(topics, count, topic=BAD, taken=()):
    """A pass in which the broker refuses `count` messages."""
    topics.record(taken, [(topic, REFUSED)] * count)
    topics.store()


def forbid(topics, topic=BAD):
    topics.record([], [(topic, Verdict(PublishOutcome.FORBIDDEN, FORBIDDEN))])
    topics.store()


def see(topics, topic=BAD, *, in_trial=(), mode="refused", probe_in=math.inf):
    topics.update([TopicPause(topic, mode, frozenset(in_trial), probe_in)])


def warnings(caplog, words):
    return [record for record in caplog.records if record.levelno == logging.WARNING and words in record.getMessage()]


class TestRefusals:
    def test_a_topic_is_paused_by_20_refusals_in_a_row_and_not_before(self, topics, stored):
        for _ in range(REFUSALS - 1):
            refuse(topics, 1)
            assert not stored.paused

        refuse(topics, 1)
        reason, seconds, probe_after = stored.paused[BAD]
        assert (reason, seconds) == (WHY, FIRST_PAUSE)
        assert FIRST_PAUSE / 2 <= probe_after <= FIRST_PAUSE

    def test_topic_is_paused_by_later_refusals_when_earlier_ones_could_not_be_stored(self, topics, stored, monkeypatch):
        def fail(*_):
            raise RuntimeError

        with monkeypatch.context() as patch:
            patch.setattr(stored, "pause_refused", fail)
            with pytest.raises(RuntimeError):
                refuse(topics, REFUSALS)
        refuse(topics, REFUSALS)

        assert BAD in stored.paused

    def test_refusals_of_thousands_of_topics_are_not_all_counted_for_ever(self, topics, stored):
        for number in range(3000):
            topics.record(["silent.and.taken"], [(f"topic-{number}", REFUSED)], silent=[f"silent-{number}"])
        assert len(topics._refusals) == len(topics._silent) == 1000

        refuse(topics, REFUSALS - 1, topic="topic-2999")
        assert [*stored.paused] == ["topic-2999"]


class TestSilentTopic:
    """The broker has messages of it, and confirms none."""

    def test_silent_topic_is_paused_when_its_probe_is_not_confirmed_and_logged_once(self, topics, stored, caplog):
        topics.record([GOOD], silent=[BAD])
        assert (topics.is_probed(BAD), topics.is_probed(GOOD)) == (True, False)
        topics.store()
        assert not stored.paused

        for _ in range(2):
            topics.record([], silent=[BAD], unconfirmed=[BAD])
            topics.store()

        assert [*stored.paused] == [BAD]
        assert len(warnings(caplog, "does not confirm its messages")) == 1

    @pytest.mark.parametrize("late", [False, True])
    def test_topic_is_no_longer_silent_after_any_confirm(self, topics, stored, late):
        topics.record([], silent=[BAD])
        topics.record([BAD], silent=[BAD], unconfirmed=[BAD] if late else [])
        topics.store()

        assert not topics.is_probed(BAD)
        assert not stored.paused


class TestPausedTopic:
    def test_only_messages_in_trial_are_sent(self, topics):
        see(topics, in_trial=[7])

        assert topics.stops(BAD, 6)
        assert not topics.stops(BAD, 7)
        assert not topics.stops(GOOD, 6)
        assert (topics.is_paused(BAD), topics.is_paused(GOOD)) == (True, False)

    def test_one_refused_probe_prolongs_the_pause(self, topics, stored):
        see(topics, in_trial=[7])
        refuse(topics, 1)

        assert stored.prolonged == [(BAD, WHY, LONGEST_PAUSE)]
        assert not stored.paused

    def test_passes_without_messages_of_the_topic_change_nothing(self, topics, stored):
        see(topics)
        refuse(topics, 3, topic=GOOD, taken=["other.topic"])

        assert not stored.prolonged

    def test_probes_are_made_ready_when_they_are_due(self, topics, stored, clock):
        see(topics, probe_in=2.0)
        assert topics.make_ready(100) == 0
        assert topics.seconds_left() == 2.0

        clock.now += 2.0
        assert topics.seconds_left() == 0.0
        assert topics.make_ready(100) == PROBES
        assert stored.tried == [(BAD, PROBES)]

    def test_one_resuming_topic_at_a_time_gets_its_next_batch(self, topics, stored):
        topics.update([TopicPause(name, frozenset(), True, math.inf) for name in (BAD, GOOD)])

        assert topics.make_ready(100) == 100
        [(topic, most)] = stored.resumed
        assert (topic in {BAD, GOOD}, most) == (True, 100)


class TestLog:
    def test_lane_that_finds_a_topic_paused_by_another_lane_reports_nothing(self, topics, clock, caplog):
        beside = PausedTopics("default")
        for lane in (topics, beside):
            forbid(lane)
            refuse(lane, REFUSALS, topic=GOOD)

        assert len(warnings(caplog, BAD)) == len(warnings(caplog, GOOD)) == 1
        [report] = warnings(caplog, BAD)
        assert "set_topic_permissions" in report.getMessage()
        assert "ACCESS_REFUSED" in report.getMessage()

    def test_topic_that_becomes_forbidden_while_it_is_paused_is_reported_once(self, topics, stored, caplog):
        for before in (WHY, FORBIDDEN, None):
            stored.before = before
            see(topics, in_trial=[7])
            forbid(topics)

        assert len(warnings(caplog, "the broker forbids it")) == 1


class BreakerAgainstModel(RuleBasedStateMachine):
    """A plain model of the specification: which topics are paused and resumed, for two topics at the same time."""

    TOPICS = (BAD, GOOD)

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.stored = Store()
        self.patch.setattr(breaker, "paused_topics", self.stored)
        self.topics = PausedTopics("default")
        self.in_a_row = dict.fromkeys(self.TOPICS, 0)
        self.paused = set()

    def teardown(self):
        self.patch.undo()

    @rule()
    def look(self):
        self.topics.update([TopicPause(topic, frozenset([7]), False, math.inf) for topic in self.stored.paused])

    @rule(
        accepted=st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 3)),
        refused=st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 25)),
    )
    def a_pass_ends(self, accepted, refused):
        seen = {topic for topic in self.TOPICS if self.topics.is_paused(topic)}
        self.topics.record(
            [topic for topic, count in accepted.items() for _ in range(count)],
            [(topic, REFUSED) for topic, count in refused.items() for _ in range(count)],
        )
        self.topics.store()
        for topic in self.TOPICS:
            if topic in accepted:
                self.in_a_row[topic] = 0
                self.paused -= {topic} & seen
            elif topic in refused:
                self.in_a_row[topic] += refused[topic]
                if topic in seen or self.in_a_row[topic] >= REFUSALS:
                    self.in_a_row[topic] = 0
                    self.paused |= {topic} - seen

    @invariant()
    def pauses_what_the_model_predicts(self):
        assert self.stored.paused.keys() == self.paused


TestBreakerAgainstAModel = pytest.mark.long(BreakerAgainstModel.TestCase)
TestBreakerAgainstAModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
