"""Messages that no honest producer sends, to one consumer: each is handled or a dead letter, and stops nothing behind it."""

from __future__ import annotations

import itertools
import json
import zlib
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import NamedTuple

import amqp
import kombu
import pytest

from inbox.models import InboxMessage
from inbox.states import State
from tests.support.apps.effects.models import Effect
from tests.support.apps.worker import JOB
from tests.support.workers import CONFIRMED, EXCHANGE, OF_THE_WORKERS, broker_options, declare, length_of

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

SHORT = timedelta(milliseconds=200)
STRUCTURED = "application/cloudevents+json"
NOT_UTF_8 = "PLACEHOLDER"
"""On the wire it is as many bytes of 0xFF, which no client library would send as text."""
DONE, DEAD = State.DONE, State.DEAD
NUMBERS = itertools.count(1)
"""What distinguishes messages that are equal otherwise."""


class Malformed(NamedTuple):
    ends: str
    body: bytes
    headers: dict
    properties: dict


def plain(ends, body=None, *, headers=None, **properties):
    return Malformed(ends, b'{"n": %d}' % next(NUMBERS) if body is None else body, headers or {}, properties)


def binary(ends, **attributes):
    """A CloudEvent in binary mode, with these attributes changed; None leaves one out."""
    given = {"specversion": "1.0", "id": "an-id", "source": f"/malformed/{next(NUMBERS)}", "type": JOB, **attributes}
    return plain(ends, headers={f"cloudEvents:{name}": value for name, value in given.items()})


def structured(ends, body=None, **attributes):
    """A CloudEvent in structured mode, with these attributes changed."""
    event = {
        "specversion": "1.0",
        "id": "an-id",
        "source": f"/malformed/{next(NUMBERS)}",
        "type": JOB,
        "data": {},
        **attributes,
    }
    return plain(ends, json.dumps({**event, **attributes}).encode() if body is None else body, content_type=STRUCTURED)


def nested(depth):
    table = {}
    for _ in range(depth):
        table = {"in": table}
    return table


BODIES = {
    "empty": plain(DEAD, b""),
    "cut off": plain(DEAD, b'{"do": "wo'),
    "invalid UTF-8": plain(DEAD, b'{"a": "\xff\xfe"}'),
    "UTF-8 with a byte order mark": plain(DONE, b"\xef\xbb\xbf{}"),
    "raw NUL": plain(DEAD, b'{"a": "\0"}'),
    "lone surrogate": plain(DONE, b'{"a": "\\ud800"}'),
    "not a number": plain(DONE, b'{"a": NaN}'),
    "a float beyond range": plain(DONE, b'{"a": 1e999}'),
    "a number of 10,000 digits": plain(DEAD, b'{"a": ' + b"9" * 10_000 + b"}"),
    "arrays in arrays": plain(DEAD, b"[" * 100_000 + b"]" * 100_000),
    "objects in objects": plain(DEAD, b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "the same name twice": plain(DONE, b'{"a": 1, "a": 2}'),
    "null": plain(DEAD, b"null"),
    "a list": plain(DEAD, b"[1, 2]"),
    "a way that the handler does not know": plain(DEAD, b'{"do": "nothing known"}'),
    "a list where the handler wants text": plain(DEAD, b'{"do": []}'),
    "a megabyte of text": plain(DONE, json.dumps({"a": "x" * 1024 * 1024}).encode()),
}
CONTENT = {
    "content type blank": plain(DONE, content_type=""),
    "content type text": plain(DEAD, content_type="text/plain"),
    "content type pickle": plain(DEAD, b"cos\nsystem\n.", content_type="application/x-python-serialize"),
    "content type in capitals": plain(DONE, content_type="APPLICATION/JSON; CHARSET=UTF-8"),
    "content type of 255 characters": plain(DEAD, content_type="x" * 255),
    "content type NUL": plain(DEAD, content_type="application/\0json"),
    "content type not UTF-8": plain(DEAD, content_type=NOT_UTF_8),
    "content type of a batch": plain(DEAD, b"[]", content_type="application/cloudevents-batch+json"),
    "content encoding unknown": plain(DONE, content_encoding="no-such-encoding"),
    "content encoding UTF-16": plain(DONE, content_encoding="utf-16"),
    "content encoding gzip, plain body": plain(DONE, content_encoding="gzip"),
    "content encoding NUL": plain(DONE, content_encoding="\0"),
    "compression unknown": plain(DEAD, headers={"compression": "no-such-thing"}),
    "compression of a plain body": plain(DEAD, headers={"compression": "application/x-gzip"}),
    "compression cut off": plain(DEAD, zlib.compress(b"{}" * 100)[:9], headers={"compression": "application/x-gzip"}),
}
PROPERTIES = {
    "no message id": plain(DEAD, message_id=None),
    "message id blank": plain(DEAD, message_id=""),
    "message id too long for the column of the handler": plain(DEAD, message_id="x" * 255),
    "message id NUL": plain(DONE, message_id="a\0b"),
    "message id not UTF-8": plain(DEAD, message_id=NOT_UTF_8),
    "message id of ours": plain(DONE, message_id="parked:redelivery:1"),
    "correlation id of 255 characters": plain(DONE, correlation_id="x" * 255),
    "correlation id not UTF-8": plain(DEAD, correlation_id=NOT_UTF_8),
    "every other property odd": plain(DONE, reply_to="\0", type="\0", app_id="x" * 255, priority=255, delivery_mode=1),
}
HEADERS = {
    "header names odd": plain(DONE, headers={"": "blank", "a\0b": "NUL", "x" * 200: "long", "ä": "not ASCII"}),
    "header name not UTF-8": plain(DONE, headers={NOT_UTF_8: "x"}),
    "header value not UTF-8": plain(DONE, headers={"a": NOT_UTF_8}),
    "header values of every type": plain(
        DONE,
        headers={
            "none": None,
            "bytes": b"\xff\0",
            "number": -(2**63),
            "decimal": Decimal("1.5"),
            "time": datetime(1970, 1, 1, tzinfo=UTC),
            "list": [1, [None, {"a": b"\xff"}]],
        },
    ),
    "headers nested in headers": plain(DONE, headers={"a": nested(50)}),
    "headers of a megabyte": plain(DONE, headers={f"h{n}": "x" * 1000 for n in range(120)} | {"long": "y" * 5000}),
    "headers of a dead letter exchange": plain(DONE, headers={"x-death": "never", "x-first-death-queue": 7}),
}
ATTRIBUTES = {
    "id a number": binary(DONE, id=7),
    "id a list": binary(DONE, id=[1, 2]),
    "id bytes": binary(DONE, id=b"\xff\0"),
    "id of 5,000 characters": binary(DONE, id="x" * 5000),
    "id NUL": binary(DONE, id="\0"),
    "type of another topic": binary(DEAD, type="shop.other"),
    "type a number": binary(DEAD, type=7),
    "type blank": binary(DONE, type=""),
    "source a table": binary(DONE, source={"a": 1}),
    "specversion unknown": binary(DONE, specversion="99.9"),
    "time a word": binary(DONE, time="yesterday"),
    "time before the calendar": binary(DONE, time="0001-01-01T00:00:00+14:00"),
    "time after the calendar": binary(DONE, time="9999-12-31T23:59:59-14:00"),
    "time of the year 1": binary(DEAD, time="0001-01-01T00:00:00Z"),
    "time of the year 9999": binary(DEAD, time="9999-12-31T23:59:59Z"),
    "time a number beyond range": binary(DONE, time=2**62),
    "time a table": binary(DONE, time={"a": 1}),
    "delivery time a word": binary(DONE, deliverat="soon"),
    "biz-id a list": binary(DONE, bizid=[1, None]),
    "biz-id of 5,000 characters": binary(DONE, bizid="x" * 5000),
    "key of 5,000 characters with NULs": binary(DONE, orderingkey="k\0" * 2500),
    "trace parent odd": binary(DONE, traceparent="\0" * 300, correlationid=[1], causationid={"a": 1}),
    "replay odd": binary(DONE, replay=[1]),
}
EVENTS = {
    "event not JSON": structured(DEAD, b"{"),
    "event a list": structured(DEAD, b"[]"),
    "event without anything": structured(DEAD, b"{}"),
    "event not UTF-8": structured(DEAD, b'{"specversion": "1.0", "id": "\xff"}'),
    "event nested too deep": structured(DEAD, b'{"specversion":"1.0","data":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "event with NaN": structured(DEAD, b'{"specversion": "1.0", "data": NaN}'),
    "event with lone surrogates": structured(DONE, data={"a": "\ud800"}),
    "event id a list": structured(DONE, id=[1]),
    "event type of another topic": structured(DEAD, type="shop.other"),
    "event type a table": structured(DEAD, type={}),
    "event time a list": structured(DONE, time=[2026]),
    "event data not base64": structured(DEAD, data_base64="%%%"),
    "event data base64 of a number": structured(DEAD, data_base64=7),
    "event data of another type": structured(DEAD, datacontenttype="application/x-python-serialize"),
    "event data left out": structured(DEAD, data=None),
}
MALFORMED = {**BODIES, **CONTENT, **PROPERTIES, **HEADERS, **ATTRIBUTES, **EVENTS}
STORED_AS_IT_CAME = {"event without anything", "event a list", "event not UTF-8", "event data not base64"}
"""Events without data that can be read."""
NAME_BY_BODY = {case.body: name for name, case in MALFORMED.items()}
"""For those whose headers cannot be read, so that their rows do not have the name of the case."""


@contextmanager
def publishing(url):
    """Publish a message as raw as py-amqp and RabbitMQ allow: `publish(body, headers, **properties)`."""
    with kombu.Connection(url, transport_options=CONFIRMED) as connection:
        channel = connection.default_channel
        transport = connection.connection.transport
        write = transport._write
        transport._write = lambda data: write(bytes(data).replace(NOT_UTF_8.encode(), b"\xff" * len(NOT_UTF_8)))

        def publish(body, headers, **properties):
            properties = {name: value for name, value in properties.items() if value is not None}
            channel.basic_publish(amqp.Message(body, application_headers=headers, **properties), EXCHANGE, JOB)

        yield publish


def test_consumer_settles_every_malformed_message_and_handles_the_valid_one_behind_each(
    a_process, rabbitmq_server, rabbitmq_url
):
    declare(OF_THE_WORKERS, broker_options(rabbitmq_url))
    with publishing(rabbitmq_url) as publish:
        for name, (_, body, headers, properties) in MALFORMED.items():
            usual = {"content_type": "application/json", "message_id": f"odd {name}"}
            publish(body, {**headers, "case": name}, **{**usual, **properties})
            publish(b"{}", {}, content_type="application/json", message_id=f"valid behind {name}")

    rows = InboxMessage.objects.filter(state__in=[DONE, DEAD])
    with a_process("inbox_consume", BACKOFF=(SHORT, SHORT), MAX_ATTEMPTS=2) as process:
        process.until(lambda: rows.count() == 2 * len(MALFORMED))
        process.until(lambda: length_of(rabbitmq_server, OF_THE_WORKERS, broker_options(rabbitmq_url)) == 0)
        assert process.end() == 0
    valid = {f"valid behind {name}" for name in MALFORMED}
    assert set(InboxMessage.objects.filter(state=DONE, message_id__in=valid).values_list("message_id", flat=True)) == valid
    malformed = InboxMessage.objects.exclude(message_id__in=valid)
    ended = {row.headers.get("case") or NAME_BY_BODY[bytes(row.body)]: row.state for row in malformed}
    assert ended.keys() == MALFORMED.keys()
    assert {name: state for name, state in ended.items() if state != MALFORMED[name].ends} == {}
    assert all(row.last_error for row in malformed if row.state == DEAD)
    bodies = {row.headers["case"]: bytes(row.body) for row in malformed if row.headers.get("case") in STORED_AS_IT_CAME}
    assert bodies == {name: MALFORMED[name].body for name in STORED_AS_IT_CAME}
    assert Effect.objects.count() == InboxMessage.objects.filter(state=DONE).count()
    assert "Traceback" not in process.said()
    assert len(process.said().splitlines()) <= len(MALFORMED), "it says more than a line for each"
