"""Settings: all mistakes are reported together, each with its remedy."""

from dataclasses import dataclass
from datetime import timedelta

import pytest

from exactly_once.conf import settings as options
from exactly_once.conf.settings import InvalidOptions
from outbox.conf import OutboxOptions, outbox_options


@dataclass(frozen=True, kw_only=True)
class Inner:
    DEPTH: int = 1


@dataclass(frozen=True, kw_only=True)
class Example:
    COUNT: int = 1
    SHARE: float = 0.5
    NAMES: tuple[str, ...] = ()
    INTERVAL: timedelta = timedelta(seconds=1)
    ON: bool = False
    INNER: Inner = Inner()


def problems_of(given, kind=Example):
    with pytest.raises(InvalidOptions) as caught:
        options.parse(kind, "EXAMPLE", given)
    return caught.value.problems


@pytest.mark.parametrize("name", ["CUONT", "count"])
def test_a_misspelt_option_is_refused_with_a_suggestion(name):
    assert problems_of({name: 3}) == [f"EXAMPLE has no option '{name}'. Did you mean 'COUNT'?"]


@pytest.mark.parametrize(("name", "shown"), [("ZZZZZZZZ", "'ZZZZZZZZ'"), (7, "an int"), ("amqp://u:secret@h", "a str")])
def test_an_unknown_option_is_refused_with_the_list_of_known_options(name, shown):
    [problem] = problems_of({name: 3})

    assert f"no option {shown}." in problem
    assert "Known options: COUNT, INNER, INTERVAL, NAMES, ON, SHARE." in problem


@pytest.mark.parametrize("name", ["SHARDS", "SHARD_COUNT", "shards"])
def test_the_number_of_shards_cannot_be_set(name):
    with pytest.raises(InvalidOptions, match=f"OUTBOX has no option '{name}'"):
        options.parse(OutboxOptions, "OUTBOX", {name: 64})


@pytest.mark.parametrize(
    ("name", "value", "kind", "expected"),
    [
        ("COUNT", "3", "a str", "an int"),
        ("COUNT", 3.5, "a float", "an int"),
        ("COUNT", True, "a bool", "an int"),
        ("SHARE", "half", "a str", "a float"),
        ("SHARE", True, "a bool", "a float"),
        ("NAMES", "abc", "a str", "a list or tuple of str"),
        ("NAMES", [1, "a"], "a list of int, str", "a list or tuple of str"),
        ("INTERVAL", 5, "an int", 'a timedelta, or text such as "90s"'),
        ("INTERVAL", "soon", "a str", 'a timedelta, or text such as "90s"'),
        ("ON", 1, "an int", "a bool"),
        ("COUNT", None, "None", "an int"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_type_the_expected_one_and_an_example(name, value, kind, expected):
    """Not with the value: it may hold a password."""
    examples = {"COUNT": "1", "SHARE": "0.5", "NAMES": "['…']", "INTERVAL": "timedelta(seconds=1)", "ON": "True"}
    assert problems_of({name: value}) == [f"EXAMPLE[{name!r}] is {kind}: it must be {expected}, such as {examples[name]}."]


def test_an_int_is_accepted_for_a_float_and_a_list_for_a_tuple():
    parsed = options.parse(Example, "EXAMPLE", {"SHARE": 1, "NAMES": ["a"]})

    assert parsed == Example(SHARE=1, NAMES=["a"])


def test_a_duration_is_accepted_as_text_also_in_a_list_and_in_a_dictionary():
    parsed = options.parse(OutboxOptions, "OUTBOX", {"KEEP_HISTORY": "7d", "BACKOFF": ["1s", "5m"], "CHECKS": {"AFTER": "90s"}})

    assert (timedelta(days=7), timedelta(seconds=90)) == (parsed.KEEP_HISTORY, parsed.CHECKS.AFTER)
    assert parsed.retry.cap == timedelta(minutes=5)
    assert problems_of({"BACKOFF": ["1s", "soon"]}, OutboxOptions)


def test_a_dictionary_in_a_setting_is_parsed_into_its_own_options():
    parsed = options.parse(Example, "EXAMPLE", {"INNER": {"DEPTH": 3}})

    assert parsed == Example(INNER=Inner(DEPTH=3))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"DEPHT": 3}, "EXAMPLE['INNER'] has no option 'DEPHT'. Did you mean 'DEPTH'?"),
        ({"DEPTH": "3"}, "EXAMPLE['INNER']['DEPTH'] is a str: it must be an int, such as 1."),
        ({"DEPTH": 0}, "EXAMPLE['INNER']['DEPTH'] is 0: it must be greater than zero."),
        (3, "EXAMPLE['INNER'] must be a dict, not an int."),
        (None, "EXAMPLE['INNER'] must be a dict, not None."),
    ],
)
def test_mistakes_in_a_dictionary_in_a_setting_name_the_dictionary(given, problem):
    assert problems_of({"INNER": given}) == [problem]


def test_every_mistake_is_reported_at_once():
    assert len(problems_of({"COUNT": "x", "SHRE": 1.0, "INTERVAL": 5, "INNER": {"DEPTH": "3"}})) == 4


@pytest.mark.parametrize("given", [{"COUNT": 0}, {"COUNT": -1}, {"INTERVAL": timedelta()}])
def test_zero_or_less_is_refused_for_a_number_or_a_duration(given):
    [problem] = problems_of(given)

    assert "must be greater than zero" in problem
    assert next(iter(given)) in problem


def test_a_duration_of_more_than_a_century_is_refused_because_no_database_calculates_with_it():
    [problem] = problems_of({"INTERVAL": timedelta.max})

    assert problem.startswith("EXAMPLE['INTERVAL'] is datetime.timedelta(days=999999999")
    assert "it must be at most a century, timedelta(days=36500)" in problem
    options.parse(Example, "EXAMPLE", {"INTERVAL": timedelta(days=36_500)})


@pytest.mark.parametrize(("given", "kind"), [(None, "None"), ([], "a list"), ("amqp://u:secret@h", "a str"), (3, "an int")])
def test_a_setting_that_is_not_a_dict_is_refused(given, kind):
    assert problems_of(given) == [f"EXAMPLE must be a dict, not {kind}."]


class TestOutboxOptions:
    def test_options_follow_a_change_of_the_setting(self, settings):
        settings.OUTBOX = {"BATCH_SIZE": 7}
        assert outbox_options().BATCH_SIZE == 7

        settings.OUTBOX = {"BATCH_SIZE": 8}
        assert outbox_options().BATCH_SIZE == 8

    def test_without_a_setting_all_options_have_their_defaults(self, settings):
        del settings.OUTBOX

        assert outbox_options() == OutboxOptions()

    @pytest.mark.parametrize(
        ("option", "given"),
        [
            ("BATCH_DEADLINE", {"WATCHDOG": timedelta(seconds=5), "BATCH_DEADLINE": timedelta(seconds=5)}),
            ("POLL_INTERVAL", {"POLL_INTERVAL": timedelta(minutes=2)}),
        ],
    )
    def test_a_watchdog_not_longer_than_the_batch_deadline_or_the_poll_interval_is_refused(self, option, given):
        """It would end a relay that is busy or idle."""
        [problem] = problems_of(given, OutboxOptions)

        assert "WATCHDOG" in problem
        assert option in problem

    @pytest.mark.parametrize("name", ["", "amq.topic", "x" * 256, "a\x00b"])
    def test_an_exchange_name_that_a_broker_would_not_declare_is_refused(self, name):
        [problem] = problems_of({"EXCHANGE": name}, OutboxOptions)

        assert "EXCHANGE" in problem

    def test_the_source_defaults_to_the_project_name(self):
        assert OutboxOptions().source == "/tests"
        assert OutboxOptions(SOURCE="/shop").source == "/shop"

    def test_an_unroutable_message_is_retried_within_a_minute(self):
        policy = OutboxOptions().unroutable_retry

        assert all(timedelta() < policy.delay(attempt) <= timedelta(minutes=1) for attempt in range(1, 200))
        assert policy.delay(200) >= timedelta(seconds=30)


class TestTopics:
    @pytest.mark.parametrize(
        ("topics", "problem"),
        [
            ({"shop.*": {"max_attemps": 3}}, "TOPICS['shop.*'] has no option 'max_attemps'. Did you mean 'MAX_ATTEMPTS'?"),
            ({"shop.*": {"MAX_ATTEMPTS": "3"}}, "TOPICS['shop.*']['MAX_ATTEMPTS'] is a str: it must be an int, such as 10."),
            ({"shop.*": {"MAX_ATTEMPTS": True}}, "TOPICS['shop.*']['MAX_ATTEMPTS'] is a bool: it must be an int, such as 10."),
            ({"shop.*": {"MAX_ATTEMPTS": 0}}, "TOPICS['shop.*']['MAX_ATTEMPTS'] is 0: it must be greater than zero."),
            ({"shop.*": {"BACKOFF": (timedelta(1),)}}, "TOPICS['shop.*']: BACKOFF must be two durations"),
            ({"shop.*": {"BACKOFF": (timedelta(2), timedelta(1))}}, "TOPICS['shop.*']: BACKOFF must be two durations"),
            ({"shop.*": {"BACKOFF": (timedelta(2), timedelta.max)}}, "of at most a century"),
            ({"shop.*": {"RATE": "100"}}, "TOPICS['shop.*']: RATE is '100': it must be a positive number per s, m or h, like"),
            ({"shop.*": {"RATE": "0/s"}}, "TOPICS['shop.*']: RATE is '0/s': it must be a positive number per s, m or h, like"),
            ({"shop.*": {"RATE": 100}}, "TOPICS['shop.*']['RATE'] is an int: it must be a str, such as"),
            ({"shop.*": {"EXCHANGE": "amq.topic"}}, "TOPICS['shop.*']: EXCHANGE is 'amq.topic': the broker reserves"),
            ({"shop.*": 3}, "TOPICS['shop.*'] must be a dict, not an int."),
            ({"shop.*.placed": {}}, "TOPICS has the pattern 'shop.*.placed': it must be a topic"),
            ({"shop.#": {}}, "TOPICS has the pattern 'shop.#': it must be a topic"),
            ({"": {}}, "TOPICS has the pattern"),
            ({7: {}}, "TOPICS has the pattern an int"),
        ],
    )
    def test_invalid_options_of_topics_are_refused_by_name(self, topics, problem):
        [found] = problems_of({"TOPICS": topics}, OutboxOptions)

        assert problem in found

    @pytest.mark.parametrize(
        ("topic", "attempts", "exchange"),
        [("shop.order.placed", 1, "orders"), ("shop.order.paid", 2, "orders"), ("shop.x", 3, "all"), ("shop", 17, "all")],
    )
    def test_each_option_is_that_of_the_most_specific_pattern_that_has_it(self, topic, attempts, exchange):
        topics = {
            "shop.order.placed": {"MAX_ATTEMPTS": 1},
            "*": {"EXCHANGE": "all"},
            "shop.*": {"MAX_ATTEMPTS": 3},
            "shop.order.*": {"MAX_ATTEMPTS": 2, "EXCHANGE": "orders"},
        }
        found = OutboxOptions(TOPICS=topics).topic(topic)

        chosen = found.MAX_ATTEMPTS, found.EXCHANGE
        assert chosen == (attempts, exchange)

    def test_rate_is_given_per_second_minute_or_hour_and_a_more_specific_pattern_may_lift_it(self):
        rates = {"*": "100/s", "a": "90/m", "b": "5/h", "c": ""}
        chosen = OutboxOptions(TOPICS={pattern: {"RATE": rate} for pattern, rate in rates.items()})

        assert [chosen.topic(topic).per_second for topic in "abcd"] == [1.5, 5 / 3600, 0.0, 100.0]
        assert OutboxOptions().topic("a").per_second == 0.0

    def test_options_of_a_topic_are_computed_once(self):
        chosen = OutboxOptions(TOPICS={"*": {"MAX_ATTEMPTS": 2}})

        assert chosen.topic("a") is chosen.topic("a")
        assert (default := OutboxOptions()).topic("a") is default.topic("b")
