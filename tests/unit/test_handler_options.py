"""The options of a handler: what each value refuses, and which combinations cannot be written or are refused."""

from datetime import timedelta
from functools import partial

import pytest

from exactly_once.wire.retry import RetryPolicy
from inbox import Backoff, Batch, Lease, Ordered, Retry, Shed, batch_handler, idempotent_handler, leased_handler
from inbox.contrib.http import subscribe
from inbox.errors import Reject, RetryLater, StepInterrupted, TransactionEnded
from inbox.handlers.kinds import PLAIN
from inbox.handlers.registry import registry

A_SECOND, A_MINUTE, AN_HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
DEFAULT = RetryPolicy(max_attempts=17, base=timedelta(seconds=10), factor=2.5, cap=2 * AN_HOUR)
DECORATORS = [idempotent_handler, batch_handler, leased_handler]
every_decorator = pytest.mark.parametrize("decorator", DECORATORS, ids=lambda decorator: decorator.__name__)

DURATIONS = {
    "base of a backoff": lambda value: Backoff(base=value),
    "cap of a backoff": lambda value: Backoff(cap=value),
    "wait of a batch": lambda value: Batch(wait=value),
    "duration of a lease": lambda value: Lease(duration=value),
    "limit of a lease": lambda value: Lease(limit=value),
    **{f"timeout of {one.__name__}": lambda value, one=one: one("t", timeout=value) for one in DECORATORS},
}
COUNTS = {
    "max_attempts": lambda value: Retry(max_attempts=value),
    "partitions": lambda value: Ordered(partitions=value),
    "size": lambda value: Batch(size=value),
    "above": lambda value: Shed(above=value),
    "group_commit": lambda value: idempotent_handler("t", group_commit=value),
    "concurrency": lambda value: idempotent_handler("t", concurrency=value),
}


plain, leased = partial(idempotent_handler, "t"), partial(leased_handler, "t")
ORDERED, RATE = r"^ordered is .*such as Ordered\(on_dead=", r'^rate_limit is .*"2000/s"'
DEAD_ON, RETRY_ON = (
    r"^dead_on is .*such as \[ValueError\]",
    r"^retry_on is .*such as \{TimeoutError: Retry\(max_attempts=20\)\}",
)
WRONG_TYPES = [
    (
        partial(idempotent_handler, "t"),
        {"on_dead": "skip"},
        r"^on_dead is 'skip': .* Write ordered=Ordered\(on_dead='skip'\)\.",
    ),
    *((decorator, {"ordered": value}, ORDERED) for decorator in (plain, leased) for value in ("skip", 1, None)),
    (leased, {"lease": AN_HOUR}, r"^lease is .*such as Lease\(duration=timedelta\(minutes=10\)\)"),
    (Retry, {"backoff": A_MINUTE}, r"^backoff is .*such as Backoff\(base="),
    *((Backoff, {"factor": value}, r"^factor is .*such as 2") for value in ("2", True, A_SECOND)),
    *((Retry, {"dead_on": value}, DEAD_ON) for value in (ValueError, "ValueError", {ValueError}, 5)),
    *((Retry, {"retry_on": value}, RETRY_ON) for value in ([ValueError], ValueError, 5)),
    (Retry, {"retry_on": {KeyError: 5}}, r"^retry_on\[KeyError\] is 5: .*such as Retry\(max_attempts=20\)"),
]
INVALID = [
    *((plain, {"rate_limit": value}, RATE) for value in (2000, "2000", "0/s", "many")),
    (plain, {"rate_limit": "10 per s"}, r"^rate_limit is '10 per s': it must be .*\"2000/s\""),
    (Ordered, {"on_dead": "stop"}, "on_dead is 'stop': it must be 'block' or 'skip'"),
    *((Backoff, {"factor": value}, "^factor is .*must be 1 or more") for value in (0, 0.5, -2, float("inf"), float("nan"))),
    (Backoff, {"base": A_MINUTE, "cap": A_SECOND}, "cap is 0:00:01, shorter than base, 0:01:00"),
    (Lease, {"duration": 2 * AN_HOUR}, "limit is 1:00:00, shorter than duration, 2:00:00"),
    (Retry, {"retry_on": {OSError: Retry(dead_on=[KeyError])}}, r"^retry_on\[OSError\] has .*move them to the outer Retry"),
    (Retry, {"dead_on": [KeyError], "retry_on": {KeyError: Retry()}}, "^KeyError is in both dead_on and retry_on: remove it"),
    (
        partial(subscribe, "t", name="tests.subscription"),
        {"retry": Retry(dead_on=[KeyError])},
        "clients, which raise no exceptions here; remove dead_on and retry_on",
    ),
]


@pytest.fixture
def registered():
    """Register a handler and look at it: `registered(batch_handler, size=10)`."""
    names = []

    def register(decorator, **options):
        names.append(f"tests.options{len(names)}")
        decorator("t", name=names[-1], **options)(print)
        return registry.get(names[-1])

    yield register
    for name in names:
        registry.remove(name)


class TestDurations:
    @pytest.mark.parametrize("option", DURATIONS)
    def test_duration_may_be_text(self, option):
        DURATIONS[option]("15m")

    @pytest.mark.parametrize("option", DURATIONS)
    @pytest.mark.parametrize("value", [30, 0.5, "30 s", "1w", True], ids=repr)
    def test_value_that_is_not_a_duration_is_refused_with_the_right_form(self, option, value):
        seconds = value if type(value) in {int, float} else r"[\d.]+"
        kind = ValueError if isinstance(value, str) else TypeError
        with pytest.raises(kind, match=rf"^{option.split()[0]} is {value!r}: .*such as timedelta\(seconds={seconds}\)"):
            DURATIONS[option](value)

    @pytest.mark.parametrize("option", DURATIONS)
    @pytest.mark.parametrize("value", [timedelta(), -A_SECOND], ids=str)
    def test_duration_of_zero_or_less_is_refused(self, option, value):
        with pytest.raises(ValueError, match=rf"^{option.split()[0]} is .*longer than zero"):
            DURATIONS[option](value)


class TestCounts:
    @pytest.mark.parametrize("option", COUNTS)
    @pytest.mark.parametrize("value", [2.5, "2", True, timedelta(1)], ids=repr)
    def test_value_that_is_not_a_whole_number_is_refused(self, option, value):
        with pytest.raises(TypeError, match=rf"^{option} is .*whole number, such as 2"):
            COUNTS[option](value)

    @pytest.mark.parametrize("option", COUNTS)
    @pytest.mark.parametrize("value", [0, -1])
    def test_less_than_one_is_refused(self, option, value):
        with pytest.raises(ValueError, match=rf"^{option} is {value}: it must be 1 or more"):
            COUNTS[option](value)


class TestValues:
    @pytest.mark.parametrize(
        ("make", "given", "reason", "error"),
        [*((*case, TypeError) for case in WRONG_TYPES), *((*case, ValueError) for case in INVALID)],
    )
    def test_wrong_value_is_refused_with_the_right_form_or_the_reason(self, make, given, reason, error):
        with pytest.raises(error, match=reason):
            make(**given)

    @pytest.mark.parametrize(
        ("option", "value", "form"),
        [
            ("retry", 5, r"Retry\(max_attempts=5\)"),
            ("retry", Backoff(), r"Retry\(max_attempts=5\)"),
            ("shed", 10_000, r"Shed\(above=10_000\)"),
        ],
    )
    @every_decorator
    def test_another_type_than_the_value_is_refused_with_the_right_form(self, decorator, option, value, form):
        with pytest.raises(TypeError, match=rf"^{option} is .*such as {form}"):
            decorator("t", **{option: value})

    @pytest.mark.parametrize(
        ("decorator", "given", "form"),
        [
            (idempotent_handler, {"max_attempts": 3}, "Write retry=Retry(max_attempts=3)."),
            (batch_handler, {"max_attempts": 3}, "Write retry=Retry(max_attempts=3)."),
            (leased_handler, {"duration": AN_HOUR}, "Write lease=Lease(duration=datetime.timedelta(seconds=3600))."),
            (idempotent_handler, {"duration": AN_HOUR}, ""),
        ],
    )
    def test_an_argument_of_a_value_is_refused_with_the_value(self, decorator, given, form):
        with pytest.raises(TypeError) as refused:
            decorator("t", **given)

        assert str(refused.value) == f"{decorator.__name__}() has no argument {next(iter(given))!r}. {form}".rstrip()


class TestCombinations:
    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"ordered": True, "group_commit": 5}, r"tests\.options0 .*group_commit=5 .*remove one of the two options"),
            ({"ordered": Ordered(partitions=2), "shed": Shed()}, r"tests\.options0 .*remove shed or ordered"),
        ],
    )
    def test_a_contradiction_is_refused_with_what_to_do(self, registered, options, reason):
        with pytest.raises(ValueError, match=reason):
            registered(idempotent_handler, **options)

    def test_a_timeout_longer_than_the_limit_of_the_lease_is_refused(self, registered):
        with pytest.raises(ValueError, match=r"timeout of 2:00:00 is longer than .* its lease, 1:00:00.*Lease\(limit="):
            registered(leased_handler, timeout=2 * AN_HOUR)
        assert registered(leased_handler, timeout=2 * AN_HOUR, lease=Lease(limit=2 * AN_HOUR)).timeout == 2 * AN_HOUR

    def test_a_handler_holds_the_values_it_was_declared_with(self, registered):
        retry, order, lease = Retry(max_attempts=2), Ordered(on_dead="skip", partitions=4), Lease(duration=A_MINUTE)

        leased = registered(leased_handler, retry=retry, ordered=order, lease=lease, concurrency=3)
        batched = registered(batch_handler, size=7, wait=A_SECOND)
        plain = registered(idempotent_handler)

        assert (leased.retry, leased.ordered, leased.lease, leased.concurrency) == (retry, order, lease, 3)
        assert (leased.skips_dead, leased.partitions) == (True, 4)
        assert (batched.kind, batched.ordered) == (Batch(size=7, wait=A_SECOND), None)
        assert (plain.kind, plain.ordered, plain.retry, plain.concurrency) == (PLAIN, None, Retry(), None)


class TestRetry:
    def test_a_retry_that_says_nothing_is_the_policy_of_the_settings(self):
        assert Retry().over(DEFAULT) is DEFAULT

    def test_omitted_part_of_a_retry_has_the_value_of_the_settings(self):
        assert Retry(max_attempts=3).over(DEFAULT) == RetryPolicy(
            max_attempts=3, base=DEFAULT.base, factor=DEFAULT.factor, cap=DEFAULT.cap
        )
        assert Retry(backoff=Backoff(base=A_SECOND, factor=1)).over(DEFAULT) == RetryPolicy(
            max_attempts=17, base=A_SECOND, factor=1, cap=DEFAULT.cap
        )

    def test_a_base_longer_than_the_cap_of_the_settings_is_not_cut(self):
        policy = Retry(backoff=Backoff(base="1d")).over(DEFAULT)

        assert policy.cap == timedelta(days=1)
        assert timedelta(hours=12) <= policy.delay(1) <= timedelta(days=1)

    def test_the_most_specific_class_of_an_exception_decides(self):
        retry = Retry(dead_on=[LookupError], retry_on={KeyError: Retry(max_attempts=3), Exception: Retry(max_attempts=5)})

        assert [retry.after(error(), DEFAULT).max_attempts for error in (IndexError, KeyError, ValueError, SystemExit)] == [
            1,
            3,
            5,
            17,
        ]

    def test_a_policy_of_an_exception_takes_what_it_omits_from_its_retry(self):
        retry = Retry(max_attempts=4, backoff=Backoff(base=A_SECOND), retry_on={KeyError: Retry(backoff=Backoff(factor=1))})

        assert retry.after(KeyError(), DEFAULT) == RetryPolicy(max_attempts=4, base=A_SECOND, factor=1, cap=DEFAULT.cap)

    @pytest.mark.parametrize("value", ["ValueError", 5, ValueError("no"), int], ids=repr)
    def test_value_that_is_not_an_exception_is_refused_by_name(self, value):
        for retry, option in (
            (lambda: Retry(dead_on=[value]), "dead_on"),
            (lambda: Retry(retry_on={value: Retry()}), "retry_on"),
        ):
            with pytest.raises(TypeError, match=rf"^{option} contains .*must be the class of an exception"):
                retry()

    @pytest.mark.parametrize("kind", [RetryLater, Reject, StepInterrupted, TransactionEnded])
    def test_exception_that_decides_for_itself_is_refused(self, kind):
        for retry in (lambda: Retry(dead_on=[kind]), lambda: Retry(retry_on={kind: Retry()})):
            with pytest.raises(ValueError, match=rf"contains {kind.__name__}, a \w+, which no policy applies to: remove it"):
                retry()
