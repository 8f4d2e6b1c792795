"""Invalid arguments of a message are refused before anything is written: with a typed error, the value and the remedy."""

import uuid
from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from outbox import Draft, InvalidMessage, OutboxError, PayloadTooLarge
from outbox.api import new_row

TOPIC = "shop.order.placed"
NAIVE = datetime(2026, 3, 1, 12)  # noqa: DTZ001 - the mistake this is about


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
    "payload set": ({"payload": {1, 2}}, ["not JSON", "set", "{1, 2}"]),
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
    "biz_id too long": ({"biz_id": "b" * 256}, ["biz_id", "256 bytes"]),
    "biz_id NUL": ({"biz_id": "a\x00"}, ["biz_id", r"a\x00"]),
    "key None": ({"key": None}, ["key is None", "str"]),
    "key too long": ({"key": "k" * 256}, ["key", "256 bytes"]),
    "priority negative": ({"priority": -1}, ["priority is -1", "0 to 9"]),
    "priority too high": ({"priority": 10}, ["priority is 10", "0 to 9"]),
    "priority bool": ({"priority": True}, ["priority is True"]),
    "priority with key": ({"priority": 3, "key": "customer-4"}, ["priority 3", "customer-4", "exclude"]),
    "delay with deliver_at": (
        {"delay": timedelta(1), "deliver_at": datetime(2126, 1, 1, tzinfo=UTC)},
        ["delay", "deliver_at", "2126", "one of them"],
    ),
    "delay negative": ({"delay": timedelta(seconds=-1)}, ["delay is", "past"]),
    "delay number": ({"delay": 30}, ["delay is 30", "timedelta"]),
    "delay without a unit": ({"delay": "2"}, ["delay is '2'", "a number and s, m, h or d"]),
    "delay with a space": ({"delay": "2 m"}, ["delay is '2 m'"]),
    "delay in weeks": ({"delay": "1w"}, ["delay is '1w'"]),
    "delay empty": ({"delay": ""}, ["delay is ''"]),
    "delay too long as text": ({"delay": "99999d"}, ["delay is", "3650 days"]),
    "delay bool": ({"delay": True}, ["delay is True", "timedelta"]),
    "delay endless": ({"delay": timedelta.max}, ["delay is", "3650 days"]),
    "deliver_at naive": ({"deliver_at": NAIVE}, ["deliver_at is", "time zone", "2026"]),
    "deliver_at text": ({"deliver_at": "2026-03-01"}, ["deliver_at is '2026-03-01'", "aware datetime"]),
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
    "expires_in number": ({"expires_in": 60}, ["expires_in is 60", "timedelta"]),
    "headers list": ({"headers": [("a", 1)]}, ["headers is", "dict"]),
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
    "header NaN": ({"headers": {"share": float("nan")}}, ["'share' is nan"]),
    "header Infinity": ({"headers": {"share": float("inf")}}, ["'share' is inf"]),
    "header too big a number": ({"headers": {"n": 2**63}}, ["'n' is 9223372036854775808", "64-bit"]),
    "header control": ({"headers": {"tenant": "a\x00"}}, ["'tenant' is", r"a\x00"]),
    "header lone surrogate": ({"headers": {"tenant": "\ud800"}}, ["'tenant' is"]),
    "headers too large": ({"headers": {f"h{n}": "x" * 1000 for n in range(20)}}, ["headers are", "16384"]),
    "traceparent too long": ({"headers": {"traceparent": "00-" + "a" * 300}}, ["traceparent"]),
    "unique None": ({"unique": None}, ["unique is None"]),
    "strict_order None": ({"strict_order": None, "key": "k"}, ["strict_order is None"]),
    "strict_order without a key": ({"strict_order": True}, ["strict_order is True", "Give the key", "one and the same key"]),
}


def checked(topic=TOPIC, payload=None, **options):
    return new_row(Draft(topic, payload, **options), uuid.uuid4())


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD)
def test_invalid_value_is_refused_with_its_name_and_value(arguments, words):
    with pytest.raises(InvalidMessage) as refused:
        checked(**arguments)

    for word in words:
        assert word in str(refused.value)
    assert "\x00" not in str(refused.value)
    str(refused.value).encode()


def test_body_over_the_limit_is_refused_with_both_sizes(settings):
    settings.OUTBOX = {"BODY_LIMIT_BYTES": 1_000}

    assert len(checked(payload="x" * 998).body) == 1_000
    with pytest.raises(PayloadTooLarge, match=r"1001 bytes.*BODY_LIMIT_BYTES.*1000"):
        checked(payload="x" * 999)
    with pytest.raises(PayloadTooLarge, match="1002 bytes"):
        checked(payload="ä" * 500)


def test_publish_errors_are_outbox_errors_and_value_errors():
    assert issubclass(PayloadTooLarge, InvalidMessage)
    assert issubclass(InvalidMessage, OutboxError)
    assert issubclass(InvalidMessage, ValueError)
