"""Settings: a mistake is found at once, all of them together, each with its remedy."""

from dataclasses import dataclass
from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured

from outbox.conf import OutboxOptions, outbox_options
from outbox.kernel import options
from outbox.kernel.options import InvalidOptions


@dataclass(frozen=True, kw_only=True)
class Example:
    COUNT: int = 1
    SHARE: float = 0.5
    NAMES: tuple[str, ...] = ()
    REST: timedelta = timedelta(seconds=1)
    ON: bool = False

    def __post_init__(self):
        options.require_positive(self, "COUNT", "REST")


def problems_of(given, kind=Example):
    with pytest.raises(InvalidOptions) as caught:
        options.parse(kind, "EXAMPLE", given)
    return caught.value.problems


def test_what_is_not_given_is_the_default():
    assert options.parse(Example, "EXAMPLE", {}) == Example()
    assert options.parse(Example, "EXAMPLE", {"COUNT": 3}).COUNT == 3


def test_a_misspelt_name_is_answered_with_the_right_one():
    assert problems_of({"CUONT": 3}) == ["EXAMPLE has no option 'CUONT'. Did you mean 'COUNT'?"]


def test_a_name_in_lower_case_is_answered_with_the_right_one():
    assert problems_of({"count": 3}) == ["EXAMPLE has no option 'count'. Did you mean 'COUNT'?"]


@pytest.mark.parametrize("name", ["ZZZZZZZZ", 7])
def test_a_name_like_no_other_is_answered_with_all_there_are(name):
    [problem] = problems_of({name: 3})

    assert repr(name) in problem
    assert "Known options: COUNT, NAMES, ON, REST, SHARE." in problem


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COUNT", "3"),
        ("COUNT", 3.5),
        ("COUNT", True),
        ("SHARE", "half"),
        ("SHARE", True),
        ("NAMES", "abc"),
        ("NAMES", [1]),
        ("REST", 5),
        ("ON", 1),
        ("COUNT", None),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_the_right_type(name, value):
    [problem] = problems_of({name: value})

    assert f"EXAMPLE[{name!r}] is {value!r}: it must be a" in problem


def test_a_whole_number_will_do_for_a_float_and_a_list_for_a_tuple():
    options.parse(Example, "EXAMPLE", {"SHARE": 1, "NAMES": ["a"]})


def test_every_mistake_is_reported_at_once():
    assert len(problems_of({"COUNT": "x", "SHRE": 1.0, "REST": 5})) == 3


@pytest.mark.parametrize("given", [{"COUNT": 0}, {"COUNT": -1}, {"REST": timedelta()}])
def test_what_must_be_positive_is(given):
    [problem] = problems_of(given)

    assert "must be greater than zero" in problem
    assert next(iter(given)) in problem


@pytest.mark.parametrize("given", [None, [], "BROKER_URL", 3])
def test_only_a_dict_will_do(given):
    assert problems_of(given) == [f"EXAMPLE must be a dict, not {given!r}."]


class TestTheOutboxsOwn:
    def test_are_read_from_the_setting_in_force_now(self, settings):
        settings.OUTBOX = {"BATCH_SIZE": 7}
        assert outbox_options().BATCH_SIZE == 7

        settings.OUTBOX = {"BATCH_SIZE": 8}
        assert outbox_options().BATCH_SIZE == 8

    def test_need_no_setting_at_all(self, settings):
        del settings.OUTBOX

        assert outbox_options() == OutboxOptions()

    def test_a_typo_is_answered_where_it_is_used(self, settings):
        settings.OUTBOX = {"BROKER_ULR": "amqp://"}

        with pytest.raises(ImproperlyConfigured, match=r"OUTBOX has no option 'BROKER_ULR'. Did you mean 'BROKER_URL'\?"):
            outbox_options()

    def test_a_watchdog_shorter_than_a_batch_is_refused(self):
        [problem] = problems_of({"WATCHDOG": timedelta(seconds=5), "BATCH_DEADLINE": timedelta(seconds=5)}, OutboxOptions)

        assert "WATCHDOG" in problem
        assert "BATCH_DEADLINE" in problem

    def test_a_watchdog_shorter_than_a_rest_is_refused(self):
        """It would end a relay that has nothing to do."""
        [problem] = problems_of({"POLL_INTERVAL": timedelta(minutes=2)}, OutboxOptions)

        assert "WATCHDOG" in problem
        assert "POLL_INTERVAL" in problem

    @pytest.mark.parametrize("name", ["", "amq.topic", "x" * 256, "a\x00b"])
    def test_an_exchange_no_broker_would_declare_is_refused(self, name):
        [problem] = problems_of({"EXCHANGE": name}, OutboxOptions)

        assert "EXCHANGE" in problem

    @pytest.mark.parametrize("levels", [["2 m"], ["m"], ["0s"], ["1w"], ["1h", "30m", "1h"], [""], ["-1s"]])
    def test_a_delay_level_that_is_no_span_or_there_twice_is_refused(self, levels):
        [problem] = problems_of({"DELAY_LEVELS": levels}, OutboxOptions)

        assert "DELAY_LEVELS" in problem

    def test_the_source_is_the_project_unless_it_is_said(self):
        assert OutboxOptions().source == "/tests"
        assert OutboxOptions(SOURCE="/shop").source == "/shop"

    def test_an_unroutable_message_rests_a_minute_at_most(self):
        policy = OutboxOptions().unroutable_retry

        assert all(policy.delay(attempt) <= timedelta(minutes=1) for attempt in range(1, 200))
