"""A topic that the broker refuses rests, longer each time, and says so once; the others never notice."""

import logging

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outbox.relay.breaker import Breakers

REFUSALS, PROBES, FIRST_REST, LONGEST_REST = 20, 5, 1.0, 30.0
"""As the module has them: the numbers are part of what an operator sees."""
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


class TestATopicThatIsRefused:
    def test_goes_on_until_there_were_enough_refusals_in_a_row(self, breakers):
        for _ in range(REFUSALS - 1):
            breakers.note([], [BAD])
            assert admitted(breakers, BAD) == 100

        breakers.note([], [BAD])
        assert admitted(breakers, BAD) == 0

    def test_rests_at_once_when_a_whole_batch_was_refused(self, breakers):
        breakers.note([], [BAD] * 500)

        assert admitted(breakers, BAD) == 0

    def test_is_no_matter_of_another_topic(self, breakers):
        opened(breakers)

        assert admitted(breakers, GOOD) == 100

    def test_begins_to_count_anew_with_every_success(self, breakers):
        for _ in range(5):
            breakers.note([], [BAD] * (REFUSALS - 1))
            breakers.note([BAD], [])

        assert admitted(breakers, BAD) == 100

    def test_is_not_resting_when_some_of_a_batch_were_taken(self, breakers):
        """A queue that is full to the brim takes one whenever a consumer has acknowledged one."""
        breakers.note([BAD], [BAD] * 499)

        assert admitted(breakers, BAD) == 100

    def test_is_not_made_to_rest_by_the_success_of_another(self, breakers):
        breakers.note([GOOD] * 300, [BAD] * 10)
        breakers.note([GOOD] * 300, [BAD] * 10)

        assert admitted(breakers, BAD) == 0


class TestTheRest:
    def test_ends_with_a_few_probes(self, breakers, clock):
        opened(breakers)
        clock.now += FIRST_REST

        assert admitted(breakers, BAD) == PROBES
        assert admitted(breakers, BAD) == PROBES, "of each pass, until one has an answer"

    def test_doubles_with_every_refused_probe_up_to_its_limit(self, breakers, clock):
        opened(breakers)
        rests = []
        for _ in range(10):
            began = clock.now
            while not admitted(breakers, BAD, 1):
                clock.now += 0.5
            rests.append(clock.now - began)
            breakers.note([], [BAD])

        assert rests == [1, 2, 4, 8, 16, 30, 30, 30, 30, 30]

    def test_is_not_lengthened_by_a_pass_that_had_nothing_of_the_topic(self, breakers, clock):
        opened(breakers)
        for _ in range(100):
            breakers.note([GOOD], [])
            breakers.note([], ["other.topic"])
        clock.now += FIRST_REST

        assert admitted(breakers, BAD) == PROBES

    def test_is_over_with_the_first_message_that_is_taken(self, breakers, clock):
        opened(breakers)
        clock.now += FIRST_REST
        assert admitted(breakers, BAD) == PROBES

        breakers.note([BAD], [BAD] * (PROBES - 1))

        assert admitted(breakers, BAD) == 100

    def test_begins_short_again_after_that(self, breakers, clock):
        opened(breakers)
        for _ in range(5):
            clock.now += LONGEST_REST
            breakers.note([], [BAD])
        breakers.note([BAD], [])
        opened(breakers)
        clock.now += FIRST_REST

        assert admitted(breakers, BAD) == PROBES


class TestWhatWasPutOff:
    def test_stays_away_for_minutes_unless_it_is_recalled(self, breakers):
        assert 300 <= breakers.rest().total_seconds() <= 600

    def test_is_recalled_by_a_few_once_after_every_rest(self, breakers, clock):
        opened(breakers)
        assert breakers.to_recall() == []

        clock.now += FIRST_REST
        assert breakers.to_recall() == [(BAD, PROBES)]
        breakers.recalled(BAD, PROBES)
        assert breakers.to_recall() == [], "until they have been answered"

        breakers.note([], [BAD] * PROBES)
        assert breakers.to_recall() == []
        clock.now += 2 * FIRST_REST
        assert breakers.to_recall() == [(BAD, PROBES)]

    def test_is_all_recalled_when_the_topic_is_taken_again(self, breakers, clock):
        opened(breakers)
        clock.now += FIRST_REST
        breakers.note([BAD], [])

        [(topic, many)] = breakers.to_recall()
        assert (topic, many > PROBES) == (BAD, True)
        breakers.recalled(BAD, many)
        assert breakers.to_recall() == [(BAD, many)], "there may be more"
        breakers.recalled(BAD, 0)
        assert breakers.to_recall() == []

    def test_is_not_recalled_any_more_when_the_topic_is_refused_again(self, breakers, clock):
        """As a queue does that has room only now and then."""
        opened(breakers)
        clock.now += FIRST_REST
        breakers.note([BAD], [])
        opened(breakers)

        assert breakers.to_recall() == []

    def test_by_a_relay_before_this_one_is_recalled_when_it_begins(self, breakers):
        breakers.resume([BAD])
        [(topic, _many)] = breakers.to_recall()
        assert topic == BAD

        opened(breakers)
        assert breakers.to_recall() == [], "it is refused still"


class TestWhatIsSaid:
    def test_is_one_warning_when_it_opens_and_one_when_it_closes(self, breakers, clock, caplog):
        for _ in range(3):
            breakers.note([], [BAD] * 10)
        for _ in range(10):
            clock.now += LONGEST_REST
            breakers.note([], [BAD] * PROBES)
        assert len(warnings(caplog, "refused 20 messages of topic 'bad.topic' in a row")) == 1
        assert not warnings(caplog, "again.")

        breakers.note([BAD], [])
        breakers.note([BAD], [])
        assert len(warnings(caplog, "takes messages of topic 'bad.topic' again")) == 1
        assert len(caplog.records) == 2

    def test_is_nothing_about_a_few_refusals(self, breakers, caplog):
        breakers.note([], [BAD] * (REFUSALS - 1))
        breakers.note([BAD], [])

        assert not caplog.records


class BreakersAgainstModel(RuleBasedStateMachine):
    """One topic's story as the specification tells it, beside a second topic's."""

    TOPICS = (BAD, GOOD)

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.breakers = Breakers(self.clock)
        self.in_a_row = dict.fromkeys(self.TOPICS, 0)
        self.rest = dict.fromkeys(self.TOPICS, 0.0)
        self.until = dict.fromkeys(self.TOPICS, 0.0)

    @rule(seconds=st.sampled_from([0.05, 0.5, 1.0, 3.0, 61.0]))
    def time_passes(self, seconds):
        self.clock.now += seconds

    @rule(
        taken=st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 3)),
        refused=st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 25)),
    )
    def a_pass_ends(self, taken, refused):
        self.breakers.note(
            [topic for topic, count in taken.items() for _ in range(count)],
            [topic for topic, count in refused.items() for _ in range(count)],
        )
        for topic in self.TOPICS:
            if topic in taken:
                self.in_a_row[topic], self.rest[topic] = 0, 0.0
            elif topic in refused:
                self.in_a_row[topic] += refused[topic]
                if self.in_a_row[topic] >= REFUSALS:
                    self.rest[topic] = min(max(2 * self.rest[topic], FIRST_REST), LONGEST_REST)
                    self.until[topic] = self.clock.now + self.rest[topic]

    @invariant()
    def admits_what_it_should(self):
        for topic in self.TOPICS:
            resting = bool(self.rest[topic])
            expected = 30 if not resting else PROBES if self.clock.now >= self.until[topic] else 0
            assert admitted(self.breakers, topic, 30) == expected


TestBreakersAgainstAModel = BreakersAgainstModel.TestCase
TestBreakersAgainstAModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
