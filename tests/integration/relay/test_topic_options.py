"""`OUTBOX["TOPICS"]`: attempts, backoff, exchange and encoder of some topics."""

from datetime import timedelta

import kombu
import pytest
from django.db import transaction
from django.test import override_settings

from exactly_once.transport.interface import Capabilities, PublishOutcome, Sent, Transport, Verdict
from outbox import InvalidMessage, publish
from outbox.states import State
from tests.support.relaying import SECONDS, TOPIC, connected, one_pass, published, row_of, state_of

pytestmark = pytest.mark.django_db(transaction=True)
OWN = {"audit.*": {"EXCHANGE": "audit"}}


class Nacking(Transport):
    """Refuses every message because of its topic."""

    capabilities = Capabilities(confirms=True)

    def send(self, messages, deadline, **options):
        return Sent(verdicts={message.position: Verdict(PublishOutcome.NACKED, "full") for message in messages})


def test_failed_message_dies_after_the_attempts_of_its_topic_and_is_retried_after_the_backoff_of_its_topic():
    own, slow, other = published("audit.entry"), published("slow.entry"), published(TOPIC)
    hours = timedelta(hours=1), timedelta(hours=2)

    one_pass(Nacking(), TOPICS={"audit.*": {"MAX_ATTEMPTS": 1}, "slow.*": {"BACKOFF": hours}})

    assert (state_of(own), state_of(slow), state_of(other)) == (State.DEAD, State.RETRYING, State.RETRYING)
    assert (row_of(slow).available_at - row_of(other).available_at) > timedelta(minutes=29)


def a_queue(url, exchange, topic):
    with kombu.Connection(url) as connection:
        queue = kombu.Queue(f"{exchange}.queue", kombu.Exchange(exchange, "topic"), routing_key=topic, auto_delete=False)
        queue(connection.default_channel).declare()


def received(url, exchange):
    with kombu.Connection(url) as connection, connection.SimpleQueue(f"{exchange}.queue") as queue:
        message = queue.get(timeout=SECONDS)
        message.ack()
        return message


def test_message_goes_to_the_exchange_of_its_topic_and_a_missing_one_stops_its_messages_only(rabbitmq_url):
    a_queue(rabbitmq_url, "audit", "#")
    a_queue(rabbitmq_url, "outbox", "#")
    own, lost, other = published("audit.entry"), published("lost.entry"), published(TOPIC)

    with connected(rabbitmq_url) as transport:
        report = one_pass(transport, TOPICS={**OWN, "lost.*": {"EXCHANGE": "missing"}})

    assert (report.published, report.broken) == (2, None)
    assert received(rabbitmq_url, "audit").properties["message_id"] == str(own.id)
    assert received(rabbitmq_url, "outbox").properties["message_id"] == str(other.id)
    assert (state_of(lost), row_of(lost).last_error) == (State.RETRYING, "unroutable: exchange 'missing' does not exist")


def test_message_goes_to_the_exchange_of_its_topic_on_redis(redis_url):
    a_queue(redis_url, "audit", "audit.*")
    own = published("audit.entry")

    with connected(redis_url) as transport:
        assert one_pass(transport, TOPICS=OWN).published == 1

    assert received(redis_url, "audit").properties["message_id"] == str(own.id)


def test_payload_is_serialised_by_the_encoder_of_the_topic():
    encoders = {"audit.*": {"ENCODER": "tests.support.hooks.SortedSets"}}
    with override_settings(OUTBOX={"TOPICS": encoders}), transaction.atomic():
        message = publish("audit.entry", {"tags": {"b", "a"}})
        with pytest.raises(InvalidMessage, match="is not JSON"):
            publish(TOPIC, {"tags": {"b", "a"}})

    assert bytes(row_of(message).body) == b'{"tags":["a","b"]}'
