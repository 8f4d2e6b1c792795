"""The contract of a transport, run on every transport, each with its real broker."""

import json
import uuid
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from exactly_once.process.clock import monotonic
from exactly_once.transport.broker import scheme_of
from exactly_once.transport.interface import OutgoingMessage, PublishOutcome
from exactly_once.wire.envelope import Envelope, from_delivery
from inbox.handlers.decorator import idempotent_handler
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from outbox.states import State
from outbox.transports import open_transport
from tests.support.relaying import EXCHANGE, Queue, connected, drained, ids, outcomes, published, quick, row_of, soon, state_of
from tests.support.vectors import VECTORS, envelope_of

pytestmark = pytest.mark.django_db(transaction=True)

ROUTED, UNROUTABLE = "contract.routed", "contract.unroutable"


def a_message(position=1, topic=ROUTED, body=b'{"n":1}', **attributes):
    message_id = str(uuid.uuid4())
    values = {"source": "/tests", "created_at": datetime(2026, 3, 1, tzinfo=UTC), "biz_id": f"b{position}", **attributes}
    return OutgoingMessage(position=position, envelope=Envelope(**{"id": message_id, "topic": topic, "body": body, **values}))


def _through_a_broker(url):
    with Queue(url, ROUTED) as queue:

        def arrived(count):
            return [
                from_delivery(
                    properties=message.properties | {"content_type": message.content_type},
                    headers=message.headers,
                    body=message.body if isinstance(message.body, bytes) else message.body.encode(),
                    routing_key=message.delivery_info["routing_key"],
                )
                for message in queue.take(count)
            ]

        yield SimpleNamespace(url=url, arrived=arrived)


def _into_the_inbox():
    name = "contract.handler"
    idempotent_handler(ROUTED, name=name)(lambda message: None)

    def arrived(count):
        rows = list(InboxMessage.objects.filter(handler=name).order_by("pk"))
        assert len(rows) == count
        return [
            Envelope(
                id=row.message_id, topic=row.topic, key=row.key, biz_id=row.biz_id, body=bytes(row.body), headers=row.headers
            )
            for row in rows
        ]

    yield SimpleNamespace(url="local://", arrived=arrived)
    registry.remove(name)


@pytest.fixture(params=["amqp", "redis", pytest.param("local", marks=pytest.mark.every_database)])
def place(request):
    """A destination of the topic ROUTED; UNROUTABLE has none."""
    if request.param == "local":
        yield from _into_the_inbox()
    else:
        yield from _through_a_broker(request.getfixturevalue({"amqp": "rabbitmq_url", "redis": "redis_url"}[request.param]))


@pytest.fixture
def transport(place):
    with connected(place.url) as transport:
        yield transport


class TestEveryTransport:
    def test_sent_messages_are_confirmed_and_arrive_in_order(self, place, transport):
        messages = [a_message(position, body=f'{{"n":{position}}}'.encode()) for position in (7, 3, 9)]

        sent = transport.send(messages, soon())

        assert outcomes(sent) == dict.fromkeys((7, 3, 9), PublishOutcome.CONFIRMED)
        assert sent.broken is None
        arrived = place.arrived(3)
        assert [envelope.body for envelope in arrived] == [message.envelope.body for message in messages], "in order"
        assert [envelope.id for envelope in arrived] == [message.envelope.id for message in messages]
        assert {envelope.topic for envelope in arrived} == {ROUTED}

    def test_key_and_biz_id_arrive_unchanged(self, place, transport):
        transport.send([a_message(key="käufer-№4", biz_id="bestellung-🍰")], soon())

        [envelope] = place.arrived(1)
        assert (envelope.key, envelope.biz_id) == ("käufer-№4", "bestellung-🍰")

    def test_headers_arrive_with_the_types_that_they_were_published_with(self, place):
        headers = {"text": "ü", "whole": 2**63 - 1, "small": 0.1, "float": 1e15, "large": 1e16, "largest": 1e308, "yes": True}
        published(ROUTED, headers=headers)

        drained(place.url)

        [envelope] = place.arrived(1)
        assert {name: (type(value), value) for name, value in envelope.headers.items()} == {
            name: (type(value), value) for name, value in headers.items()
        }

    @pytest.mark.parametrize(
        "body", ['"ä 🍰"', "null", '{ "a" : 1 }', '"' + "x" * 200_000 + '"'], ids=["text", "null", "blanks", "big"]
    )
    def test_body_arrives_byte_for_byte(self, place, transport, body):
        transport.send([a_message(body=body.encode())], soon())

        assert [envelope.body for envelope in place.arrived(1)] == [body.encode()]

    def test_unroutable_message_is_returned_with_the_reason(self, place, transport):
        sent = transport.send([a_message(1), a_message(2, UNROUTABLE), a_message(3)], soon())

        assert outcomes(sent) == {1: PublishOutcome.CONFIRMED, 2: PublishOutcome.RETURNED, 3: PublishOutcome.CONFIRMED}
        assert "unroutable" in sent.verdicts[2].reason
        assert UNROUTABLE in sent.verdicts[2].reason
        assert sent.broken is None
        assert len(place.arrived(2)) == 2

    def test_messages_past_the_deadline_are_not_sent_and_have_no_verdict(self, place, transport):
        sent = transport.send([a_message(1), a_message(2)], monotonic() - 1)

        assert outcomes(sent) == {}
        assert place.arrived(0) == []

    def test_transport_is_usable_after_idling_closing_and_connecting_at_any_time(self, place):
        transport = open_transport(place.url, alias="default", exchange=EXCHANGE)

        transport.idle()
        transport.close()
        transport.connect()
        transport.idle()
        transport.connect()
        try:
            assert outcomes(transport.send([a_message()], soon())) == {1: PublishOutcome.CONFIRMED}
            transport.close()
            transport.close()
            transport.connect()
            assert (dict(transport.send([], soon()).verdicts), len(place.arrived(1))) == ({}, 1)
            assert outcomes(transport.send([a_message(2)], soon())) == {2: PublishOutcome.CONFIRMED}
        finally:
            transport.close()

    def test_message_sent_a_second_time_is_confirmed_again(self, place, transport):
        """A crash between the confirm and the commit sends it again with the same id."""
        message = a_message()

        first, second = transport.send([message], soon()), transport.send([message], soon())

        assert outcomes(first) == outcomes(second) == {1: PublishOutcome.CONFIRMED}

    def test_capabilities_name_a_weakness_of_redis_only(self, place, transport):
        assert bool(transport.capabilities.weakness) == (scheme_of(place.url) == "redis")
        assert transport.capabilities.durable

    def test_relay_publishes_through_the_transport_and_retries_unroutable_messages(self, place):
        routed, lost = published(ROUTED, {"n": 1}), published(UNROUTABLE)

        assert published_by_one_drain(place.url) == 1

        assert state_of(routed) == State.PUBLISHED
        assert (row_of(lost).state, row_of(lost).attempts) == (State.RETRYING, 1)
        assert [envelope.id for envelope in place.arrived(1)] == ids([routed])


def published_by_one_drain(url):
    """Drain with the default backoff, which is so long that no message is tried twice."""
    return drained(url, BACKOFF=type(quick())().BACKOFF).published


@pytest.mark.parametrize("name", sorted(path.stem for path in VECTORS.glob("*.json")))
@pytest.mark.parametrize("broker", ["rabbitmq_url", "redis_url"])
def test_message_on_the_wire_equals_the_frozen_vector(broker, name, request):
    vector = json.loads(Path(VECTORS / f"{name}.json").read_text())
    url = request.getfixturevalue(broker)
    with Queue(url, vector["envelope"]["topic"]) as queue, connected(url) as transport:
        transport.send(
            [OutgoingMessage(position=1, envelope=envelope_of(vector), expires_in_seconds=vector.get("expires_in_seconds"))],
            soon(),
        )
        [message] = queue.take(1)

    assert message.headers == vector["headers"]
    assert (message.body if isinstance(message.body, bytes) else message.body.encode()) == vector["body"].encode()
    properties = {**message.properties, "content_type": message.content_type, "content_encoding": message.content_encoding}
    assert {name: properties[name] for name in vector["properties"]} == vector["properties"]
