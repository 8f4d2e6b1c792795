"""The wire format, tested with frozen vectors: what could be read once must stay readable, also for other implementations."""

import json
from datetime import UTC, datetime

import pytest
from cloudevents.core.bindings.amqp import AMQPMessage, from_binary_event, from_structured_event
from hypothesis import given
from hypothesis import strategies as st

from exactly_once.wire.body import Undecodable
from exactly_once.wire.envelope import HEADERS_LIMIT_BYTES, Envelope, from_delivery, is_reserved, media_type, opened
from exactly_once.wire.text import NAME_LENGTH
from tests.support.vectors import VECTORS, envelope_of


def vectors(directory):
    found = [pytest.param(json.loads(path.read_text()), id=path.stem) for path in sorted(directory.glob("*.json"))]
    assert found, f"there are no vectors in {directory}"
    return found


def received(vector):
    return opened(
        from_delivery(
            properties=vector["properties"],
            headers=vector["headers"],
            body=vector["body"].encode(),
            routing_key=vector.get("routing_key", vector["envelope"]["topic"]),
        )
    )


def a_delivery(*, properties=None, headers=None, body=b"{}", routing_key="some.topic"):
    return from_delivery(properties=properties or {}, headers=headers or {}, body=body, routing_key=routing_key)


@pytest.mark.parametrize("vector", vectors(VECTORS))
class TestOwnMessages:
    def test_headers_are_exactly_those_of_the_frozen_vector(self, vector):
        headers = envelope_of(vector).to_headers()

        assert headers == vector["headers"]
        assert list(headers) == list(vector["headers"])
        assert {name: type(value) for name, value in headers.items()} == {
            name: type(value) for name, value in vector["headers"].items()
        }

    def test_decoding_the_frozen_vector_gives_the_envelope_that_was_sent(self, vector):
        assert received(vector) == envelope_of(vector)

    def test_the_cloudevents_package_reads_the_same_event(self, vector):
        envelope = envelope_of(vector)

        event = from_binary_event(
            AMQPMessage(
                properties={"content-type": envelope.content_type},
                application_properties=envelope.to_headers(),
                application_data=envelope.body,
            )
        )

        assert event.get_id() == envelope.id
        assert event.get_type() == envelope.topic
        assert event.get_source() == envelope.source
        assert event.get_specversion() == "1.0"
        assert event.get_time() == envelope.created_at
        assert event.get_datacontenttype() == "application/json"
        assert event.get_extension("bizid") == envelope.biz_id
        assert event.get_data() == json.loads(vector["body"])


FOREIGN = vectors(VECTORS / "received")


@pytest.mark.parametrize("vector", FOREIGN)
def test_a_foreign_message_is_decoded_to_the_expected_envelope(vector):
    assert received(vector) == envelope_of(vector)


def read_by_the_cloudevents_package(vector):
    message = AMQPMessage(
        properties={"content-type": vector["properties"]["content_type"]},
        application_properties=vector["headers"],
        application_data=vector["body"].encode(),
    )
    return from_structured_event(message) if is_structured(vector) else from_binary_event(message)


def is_structured(vector):
    return "cloudevents+json" in vector["properties"].get("content_type", "")


def is_cloudevent(vector):
    return is_structured(vector) or any(name.startswith("cloudEvents") for name in vector["headers"])


@pytest.mark.parametrize("vector", [param for param in FOREIGN if is_cloudevent(*param.values)])
def test_the_cloudevents_package_reads_the_same_identity_and_time(vector):
    event, envelope = read_by_the_cloudevents_package(vector), received(vector)

    assert (event.get_id(), event.get_type(), event.get_source()) == (envelope.id, envelope.topic, envelope.source)
    # It makes up a time where the event has none.
    assert event.get_time() == envelope.created_at or "created_at" not in vector["envelope"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"[]", "is not a CloudEvent"),
        (b"nothing", "is not JSON"),
        (b'{"id":"x"}', "is not a CloudEvent"),
        (b"\xff\xfe", "is not JSON"),
        (b'{"specversion":"1.0","id":"x","data_base64":"###"}', "is not base64"),
    ],
)
def test_a_structured_body_that_is_not_a_cloudevent_is_undecodable_with_the_reason(body, reason):
    with pytest.raises(Undecodable, match=reason):
        opened(a_delivery(properties={"content_type": "application/cloudevents+json"}, body=body))


def test_headers_added_by_the_broker_are_not_passed_on():
    """A handler may publish with the headers that it received, and after a crash those contain the headers of the broker."""
    added = {"x-delivery-count": 2, "x-acquired-count": 3, "x-first-death-queue": "q", "x-death": [{"count": 1}]}

    assert dict(a_delivery(headers={"tenant": "acme", "x-request-id": "r", **added}).headers) == {
        "tenant": "acme",
        "x-request-id": "r",
    }


def test_the_colon_prefix_takes_precedence_over_the_underscore_prefix():
    envelope = a_delivery(headers={"cloudEvents_id": "theirs", "cloudEvents:id": "ours"})

    assert envelope.id == "ours"


@pytest.mark.parametrize("value", ["missing", "", "  ", None])
def test_amqp_properties_are_used_where_cloudevents_attributes_are_missing_or_blank(value):
    names = [] if value == "missing" else ["id", "type", "time", "correlationid"]
    headers = {f"cloudEvents:{name}": value for name in names}

    envelope = a_delivery(
        properties={"message_id": "m", "correlation_id": "c", "timestamp": 1772366400}, headers=headers, routing_key="the.key"
    )

    assert (envelope.id, envelope.correlation_id, envelope.topic) == ("m", "c", "the.key")
    assert envelope.created_at == datetime(2026, 3, 1, 12, tzinfo=UTC)


def test_an_id_too_long_to_store_is_replaced_by_its_digest():
    first, second = (a_delivery(headers={"cloudEvents:id": "x" * 400 + end}) for end in "ab")

    assert first.id != second.id
    assert first.id == a_delivery(headers={"cloudEvents:id": "x" * 400 + "a"}).id
    assert len(first.id) <= NAME_LENGTH


UNREADABLE = ["yesterday", "", None, [], float("inf"), float("nan"), 10**30, "2026-13-01T00:00:00Z", b"2026"]
NOON = [
    "2026-03-01T12:00:00Z",
    "2026-03-01T13:00:00+01:00",
    1772366400,
    1772366400000,
    datetime(2026, 3, 1, 12),  # noqa: DTZ001 - py-amqp gives a naive datetime in UTC
]


@pytest.mark.parametrize("value", UNREADABLE + NOON)
def test_a_time_is_read_in_every_form_that_producers_send_and_an_unreadable_one_is_ignored(value):
    expected = datetime(2026, 3, 1, 12, tzinfo=UTC) if value in NOON else None

    assert a_delivery(headers={"cloudEvents:time": value}).created_at == expected


def test_an_id_that_is_not_a_uuid_is_deduplicated_together_with_its_source():
    ours = Envelope(id="0190b6a4-7c3e-7d2f-9a1b-0123456789ab", topic="t", source="/a")
    theirs = [Envelope(id="1", topic="t", source=source) for source in ("/a", "/b", "")]

    assert ours.dedup_id == ours.id
    assert len({envelope.dedup_id for envelope in theirs}) == 3
    assert Envelope(id="1", topic="t", source="/a", biz_id="order-1").dedup_id == "order-1"
    assert Envelope(id="", topic="t", source="/a").dedup_id == ""


RESERVED = ["cloudEvents:id", "cloudevents_x", "CLOUDEVENTS", "x-death", "X-Match", "ce-id", "CE-x", "CC", "BCC"]
NOT_RESERVED = ["tenant", "traceparent", "xylophone", "cent", "cloud", "cc", "Bcc"]


def test_header_names_of_the_protocol_are_reserved_and_no_others():
    assert [name for name in RESERVED + NOT_RESERVED if is_reserved(name)] == RESERVED


def test_media_type_drops_parameters_and_case():
    assert media_type("Application/JSON ; charset=UTF-8") == "application/json"


names = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=40)
header_values = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), names
)
instants = st.none() | st.datetimes(min_value=datetime(1, 1, 2), timezones=st.just(UTC))  # noqa: DTZ001
# A blank one counts as none.
attributes = names.map(lambda text: text if text.strip() else "")
envelopes = st.builds(
    Envelope,
    id=attributes.filter(bool),
    topic=attributes.filter(bool),
    source=attributes,
    created_at=instants,
    deliver_at=instants,
    biz_id=attributes,
    key=attributes,
    correlation_id=attributes,
    causation_id=attributes,
    traceparent=attributes,
    content_type=st.sampled_from(["application/json", "text/plain"]),
    body=st.binary(max_size=50),
    headers=st.dictionaries(names.filter(lambda name: name and not is_reserved(name)), header_values, max_size=4),
)


@given(envelopes)
def test_any_envelope_is_unchanged_by_encoding_and_decoding(envelope):
    arrived = from_delivery(
        properties={"message_id": envelope.id, "content_type": envelope.content_type},
        headers=envelope.to_headers(),
        body=envelope.body,
        routing_key=envelope.topic,
    )

    assert arrived == envelope


@given(
    st.dictionaries(st.text(max_size=30) | st.just("cloudEvents:id"), st.none() | st.text() | st.binary() | st.floats()),
    st.binary(max_size=200),
    st.sampled_from(["application/json", "application/cloudevents+json", "", "text/plain"]),
)
def test_any_delivery_is_decoded_to_json_values_or_raises_undecodable(headers, body, content_type):
    try:
        envelope = opened(a_delivery(headers=headers, properties={"content_type": content_type}, body=body))
    except Undecodable as error:
        values = [str(error)]
    else:
        values = [envelope.id, envelope.topic, envelope.headers]

    assert json.loads(json.dumps(values, allow_nan=False)) == values


def test_header_as_long_as_a_publisher_may_make_it_arrives_whole():
    token = "a" * (HEADERS_LIMIT_BYTES - 100)

    assert from_delivery(properties={}, headers={"token": token}, body=b"{}", routing_key="t").headers == {"token": token}
