"""The AMQP property `expiration`: the lifetime that is left when a relay sends the message, not the original one."""

from datetime import timedelta

import pytest

from exactly_once.transport.interface import OutgoingMessage, PublishOutcome
from exactly_once.wire.envelope import Envelope
from outbox.states import State
from tests.support.relaying import TOPIC, Queue, connected, drained, published, row_of, set_columns, soon, state_of

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)
A_STALL = timedelta(minutes=3)


def age(message, duration):
    """Move every instant of `message` into the past by `duration`."""
    row = row_of(message)
    instants = {name: getattr(row, name) for name in ("created_at", "deliver_at", "available_at", "expires_at")}
    set_columns(message, **{name: instant - duration for name, instant in instants.items() if instant})


def expiration_of(delivery):
    return timedelta(milliseconds=int(delivery.properties["expiration"]))


@pytest.fixture(params=["rabbitmq_url", "redis_url"])
def broker_url(request):
    return request.getfixturevalue(request.param)


def arrives(url):
    """What arrives when the message is relayed."""
    with Queue(url) as queue:
        drained(url)
        [arrived] = queue.take(1)
    return arrived


@pytest.mark.parametrize(
    ("delay", "late", "left"),
    [(None, 2 * HOUR / 3, HOUR / 3), (HOUR, 2 * HOUR / 3, HOUR / 3), (2 * HOUR, timedelta(), HOUR)],
    ids=["after an outage", "delayed, after an outage", "delayed, at the due time"],
)
def test_expiration_property_is_the_time_left_when_it_is_sent(broker_url, delay, late, left):
    message = published(delay=delay, expires_in=HOUR)
    age(message, (delay or timedelta()) + late)

    assert timedelta() <= left - expiration_of(arrives(broker_url)) < A_STALL


@pytest.mark.parametrize("options", [{}, {"expires_in": timedelta(days=60)}], ids=["none", "longer than RabbitMQ counts"])
def test_expiration_property_is_omitted_without_an_expiry_that_rabbitmq_can_represent(rabbitmq_url, options):
    message = published(**options)

    assert "expiration" not in arrives(rabbitmq_url).properties
    assert state_of(message) == State.PUBLISHED


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_rabbitmq_moves_an_expired_message_to_the_dead_letter_exchange(rabbitmq_url, kind):
    dead_letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead.letters"}
    message = OutgoingMessage(position=1, envelope=Envelope(id="m1", topic=TOPIC, body=b"{}"), expires_in_seconds=0.0001)
    with (
        Queue(rabbitmq_url, "nothing.else", "dead.letters") as dead_letter_queue,
        Queue(rabbitmq_url, **{"x-queue-type": kind}, **dead_letters) as queue,
        connected(rabbitmq_url) as transport,
    ):
        sent = transport.send([message], soon())
        [arrived] = dead_letter_queue.take(1)

        assert sent.verdicts[1].outcome == PublishOutcome.CONFIRMED, "the broker confirms a message that it drops later"
        assert queue.take_all() == []
    assert arrived.properties["message_id"] == "m1"
    assert arrived.headers["x-death"][0]["reason"] == "expired"
