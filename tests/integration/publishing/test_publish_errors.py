"""Invalid arguments are refused by publish(): with a typed error, the value and the remedy, and without a row."""

import json
import uuid
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from enum import Enum

import pytest
from django.db import transaction
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox import Draft, InvalidMessage, OutboxError, PayloadTooLarge, prepare, publish, publish_many
from outbox.models import OutboxMessage
from outbox.states import State
from tests.support.relaying import TOPIC, published, row_of

pytestmark = pytest.mark.django_db

NAIVE = datetime(2026, 3, 1, 12)  # noqa: DTZ001 - the mistake this is about


class Colour(Enum):
    RED = 1


def loop():
    value = []
    value.append(value)
    return value


def deep():
    value = []
    for _ in range(100_000):
        value = [value]
    return value


BAD = {
    "payload NaN": ({"payload": {"x": float("nan")}}, ["not JSON", "nan"]),
    "payload Infinity": ({"payload": float("-inf")}, ["not JSON", "inf"]),
    "payload set": ({"payload": {1, 2}}, ["not JSON", "set", "{1, 2}"]),
    "payload bytes": ({"payload": b"raw"}, ["not JSON", "b'raw'"]),
    "payload object": ({"payload": {"o": Colour.RED}}, ["not JSON", "Colour.RED"]),
    "payload tuple as name": ({"payload": {(1, 2): 3}}, ["not JSON"]),
    "payload in a circle": ({"payload": loop()}, ["not JSON"]),
    "payload too deep": ({"payload": deep()}, ["not JSON"]),
    "payload lone surrogate": ({"payload": "broken \ud83c half"}, ["not JSON", "surrogate"]),
    "topic empty": ({"topic": ""}, ["topic is empty", "shop.order.placed"]),
    "topic None": ({"topic": None}, ["topic is None", "str"]),
    "topic number": ({"topic": 7}, ["topic is 7", "str"]),
    "topic too long": ({"topic": "x" * 256}, ["topic", "xxx", "256 bytes", "255"]),
    "topic too long in bytes": ({"topic": "ä" * 128}, ["topic", "256 bytes"]),
    "topic wildcard star": ({"topic": "shop.*.placed"}, ["shop.*.placed", "wildcard"]),
    "topic wildcard hash": ({"topic": "shop.#"}, ["shop.#", "wildcard"]),
    "topic control": ({"topic": "shop\nplaced"}, [r"shop\nplaced", "control"]),
    "topic NUL": ({"topic": "shop\x00placed"}, [r"shop\x00placed", "control"]),
    "topic lone surrogate": ({"topic": "shop\udc00"}, [r"shop\udc00", "surrogate"]),
    "biz_id empty": ({"biz_id": ""}, ["biz_id is empty", "omit"]),
    "biz_id blank": ({"biz_id": " "}, ["biz_id is blank", "omit"]),
    "key blank": ({"key": " "}, ["key is blank", "omit"]),
    "biz_id number": ({"biz_id": 17}, ["biz_id is 17", "str("]),
    "biz_id uuid": ({"biz_id": uuid.UUID(int=1)}, ["biz_id is UUID", "str("]),
    "biz_id too long": ({"biz_id": "b" * 256}, ["biz_id", "256 bytes"]),
    "biz_id NUL": ({"biz_id": "a\x00"}, ["biz_id", r"a\x00"]),
    "key None": ({"key": None}, ["key is None", "str"]),
    "key too long": ({"key": "k" * 256}, ["key", "256 bytes"]),
    "key control": ({"key": "k\x1f"}, ["key", r"\x1f"]),
    "priority negative": ({"priority": -1}, ["priority is -1", "0 to 9"]),
    "priority too high": ({"priority": 10}, ["priority is 10", "0 to 9"]),
    "priority text": ({"priority": "high"}, ["priority is 'high'"]),
    "priority bool": ({"priority": True}, ["priority is True"]),
    "priority float": ({"priority": 1.0}, ["priority is 1.0"]),
    "priority with key": ({"priority": 3, "key": "customer-4"}, ["priority 3", "customer-4", "exclude"]),
    "delay with deliver_at": (
        {"delay": timedelta(1), "deliver_at": datetime(2126, 1, 1, tzinfo=UTC)},
        ["delay", "deliver_at", "2126", "one of them"],
    ),
    "delay negative": ({"delay": timedelta(seconds=-1)}, ["delay is", "past"]),
    "delay number": ({"delay": 30}, ["delay is 30", "timedelta"]),
    "delay endless": ({"delay": timedelta.max}, ["delay is", "3650 days"]),
    "deliver_at naive": ({"deliver_at": NAIVE}, ["deliver_at is", "time zone", "2026"]),
    "deliver_at text": ({"deliver_at": "2026-03-01"}, ["deliver_at is '2026-03-01'", "aware datetime"]),
    "deliver_at number": ({"deliver_at": 0}, ["deliver_at is 0", "aware datetime"]),
    "deliver_at at the end of time": (
        {"deliver_at": datetime.max.replace(tzinfo=UTC), "expires_in": timedelta(days=1)},
        ["deliver_at"],
    ),
    "deliver_at past the end of time in UTC": (
        {"deliver_at": datetime.max.replace(tzinfo=timezone.get_fixed_timezone(-60))},
        ["deliver_at"],
    ),
    "deliver_at before the beginning of time in UTC": (
        {"deliver_at": datetime.min.replace(tzinfo=timezone.get_fixed_timezone(60))},
        ["deliver_at"],
    ),
    "expires_in zero": ({"expires_in": timedelta()}, ["expires_in is", "past"]),
    "expires_in negative": ({"expires_in": timedelta(seconds=-5)}, ["expires_in is", "past"]),
    "expires_in number": ({"expires_in": 60}, ["expires_in is 60", "timedelta"]),
    "headers list": ({"headers": [("a", 1)]}, ["headers is", "dict"]),
    "headers text": ({"headers": "tenant=acme"}, ["headers is", "dict"]),
    "header reserved": ({"headers": {"cloudEvents:id": "x"}}, ["'cloudEvents:id'", "reserved"]),
    "header by which RabbitMQ routes copies": ({"headers": {"CC": "x"}}, ["'CC'", "reserved"]),
    "header by which RabbitMQ routes hidden copies": ({"headers": {"BCC": "x"}}, ["'BCC'", "reserved"]),
    "header reserved in another case": ({"headers": {"CloudEvents_id": "x"}}, ["'CloudEvents_id'", "reserved"]),
    "header of the broker": ({"headers": {"x-delay": 1}}, ["'x-delay'", "reserved"]),
    "header without a name": ({"headers": {"": "x"}}, ["header name ''"]),
    "header with a number for a name": ({"headers": {1: "x"}}, ["header name 1"]),
    "header name too long": ({"headers": {"n" * 256: "x"}}, ["header name"]),
    "header name control": ({"headers": {"a\r\nb": "x"}}, [r"a\r\nb"]),
    "header None": ({"headers": {"tenant": None}}, ["'tenant' is None"]),
    "header list": ({"headers": {"tenant": ["a"]}}, ["'tenant' is ['a']"]),
    "header bytes": ({"headers": {"tenant": b"a"}}, ["'tenant' is b'a'"]),
    "header NaN": ({"headers": {"share": float("nan")}}, ["'share' is nan"]),
    "header Infinity": ({"headers": {"share": float("inf")}}, ["'share' is inf"]),
    "header too big a number": ({"headers": {"n": 2**63}}, ["'n' is 9223372036854775808", "64-bit"]),
    "header control": ({"headers": {"tenant": "a\x00"}}, ["'tenant' is", r"a\x00"]),
    "header lone surrogate": ({"headers": {"tenant": "\ud800"}}, ["'tenant' is"]),
    "headers too large": ({"headers": {f"h{n}": "x" * 1000 for n in range(20)}}, ["headers are", "16384"]),
    "traceparent too long": ({"headers": {"traceparent": "00-" + "a" * 300}}, ["traceparent"]),
    "unique None": ({"unique": None}, ["unique is None"]),
    "unique text": ({"unique": "maybe"}, ["unique is 'maybe'"]),
    "strict_order None": ({"strict_order": None, "key": "k"}, ["strict_order is None"]),
    "strict_order text": ({"strict_order": "yes", "key": "k"}, ["strict_order is 'yes'"]),
    "strict_order without a key": ({"strict_order": True}, ["strict_order is True", "Give the key", "one and the same key"]),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("way", ["publish", "publish_many"])
def test_invalid_value_is_refused_with_its_name_and_value(way, arguments, words):
    arguments = {"topic": TOPIC, "payload": {}, **arguments}
    with transaction.atomic():
        with pytest.raises(InvalidMessage) as refused:
            publish(**arguments) if way == "publish" else publish_many([Draft(**arguments)])

        for word in words:
            assert word in str(refused.value)
        assert "\x00" not in str(refused.value)
        str(refused.value).encode()
        assert not OutboxMessage.objects.exists(), "the transaction is still good, and nothing was written"


def test_unknown_argument_is_refused():
    with transaction.atomic():
        with pytest.raises(TypeError, match="prioritiy"):
            publish(TOPIC, {}, prioritiy=3)
        with pytest.raises(TypeError, match="prioritiy"):
            Draft(TOPIC, {}, prioritiy=3)

    assert not OutboxMessage.objects.exists()


@pytest.mark.parametrize("function", [publish, prepare])
def test_misspelt_argument_is_refused_with_the_name_of_the_function_and_a_suggestion(function):
    with ExitStack() as stack:
        if function is publish:
            stack.enter_context(transaction.atomic())
        with pytest.raises(TypeError) as caught:
            function(TOPIC, {}, bizid="order-1")

    assert str(caught.value) == f"{function.__name__}() has no argument 'bizid'. Did you mean 'biz_id'?"


def test_publish_options_are_keyword_only():
    with transaction.atomic(), pytest.raises(TypeError):
        publish(TOPIC, {}, "order-17")


def test_body_over_the_limit_is_refused_with_both_sizes(settings):
    settings.OUTBOX = {"BODY_LIMIT_BYTES": 1_000}

    assert published(payload="x" * 998).created
    with pytest.raises(PayloadTooLarge, match=r"1001 bytes.*BODY_LIMIT_BYTES.*1000"):
        published(payload="x" * 999)
    with pytest.raises(PayloadTooLarge, match="1002 bytes"):
        published(payload="ä" * 500)
    assert OutboxMessage.objects.count() == 1


def test_publish_errors_are_outbox_errors_and_value_errors():
    assert issubclass(PayloadTooLarge, InvalidMessage)
    assert issubclass(InvalidMessage, OutboxError)
    assert issubclass(InvalidMessage, ValueError)


@pytest.mark.every_database
@pytest.mark.parametrize(
    "arguments",
    [
        {"topic": "x" * 255},
        {"topic": "käse.🍰"},
        {"topic": "c#.5*"},
        {"biz_id": "b" * 255, "key": "k" * 255},
        {"biz_id": "ä" * 127},
        {"priority": 9},
        {"deliver_at": datetime(1999, 1, 1, tzinfo=UTC)},
        {"headers": {"tenant": "x" * 16_000}},
        {"headers": {}},
    ],
    ids="-".join,
)
def test_values_at_their_limits_are_stored(arguments):
    row = row_of(published(**{"topic": TOPIC, **arguments}))

    assert {name: getattr(row, name) for name in arguments} == arguments


@pytest.mark.every_database
@pytest.mark.parametrize(
    ("arguments", "stored"),
    [
        ({"delay": timedelta()}, {"state": State.READY, "deliver_at": None}),
        ({"delay": timedelta(days=3650), "expires_in": timedelta(days=3650)}, {"state": State.SCHEDULED}),
        ({"headers": None}, {"headers": {}}),
    ],
    ids=["no delay", "longest delay and longest expiry", "no headers"],
)
def test_options_at_their_limits_are_accepted(arguments, stored):
    row = row_of(published(**arguments))

    assert {name: getattr(row, name) for name in stored} == stored


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3) | st.tuples(inner),
    max_leaves=8,
)
texts = st.text(st.characters(exclude_categories=["C"]), max_size=5)
names = st.text("äbc🍰", min_size=1, max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def assert_stored(message, payload, headers, topic, key):
    row = row_of(message)
    assert (row.topic, row.key) == (topic, key)
    assert row.headers == {name: value for name, value in (headers or {}).items() if name != "traceparent"}
    assert json.loads(bytes(row.body)) == json.loads(json.dumps(payload)), "tuples become lists, nothing else changes"


@pytest.mark.every_database
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=anything, headers=anything, topic=st.text(max_size=5), key=st.text(max_size=5) | anything)
def test_any_arguments_are_either_stored_as_given_or_refused_as_invalid(payload, headers, topic, key):
    before = OutboxMessage.objects.count()
    with transaction.atomic():
        try:
            message = publish(topic, payload, headers=headers, key=key)
        except InvalidMessage:
            assert OutboxMessage.objects.count() == before
            return
    assert_stored(message, payload, headers, topic, key)


@pytest.mark.every_database
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    payload=json_values,
    headers=st.none() | st.dictionaries(names, texts | st.booleans(), max_size=3),
    topic=names,
    key=texts.filter(lambda text: not text or text.strip()),
)
def test_any_valid_arguments_are_stored_as_given(payload, headers, topic, key):
    with transaction.atomic():
        message = publish(topic, payload, headers=headers, key=key)

    assert_stored(message, payload, headers, topic, key)


@pytest.mark.every_database
@pytest.mark.parametrize("priority", [0, 1, 9])
def test_priority_and_biz_id_are_stored_as_given(priority):
    row = row_of(published(priority=priority, biz_id="order-1"))

    assert (row.priority, row.biz_id) == (priority, "order-1")
