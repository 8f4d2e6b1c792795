"""A consumer stores the messages of a subscription from RabbitMQ: each once, also those that the broker delivers again."""

from datetime import timedelta

import pytest

from inbox.contrib.http import queries, subscribe
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.states import State
from tests.support.waiting import wait_until
from tests.support.workers import broker_options, consuming, declare, mark_redelivered, send

TOPIC = "shop.order.placed"
MESSAGES = [f"message-{number:02}" for number in range(12)]


@pytest.fixture
def handler(own_handlers):
    subscribe(TOPIC)
    return registry.get(TOPIC)


@pytest.mark.django_db(transaction=True)
def test_messages_from_rabbitmq_are_stored_and_read_once_although_they_are_delivered_again(handler, rabbitmq_url):
    options = broker_options(rabbitmq_url)
    declare(handler, options)
    for message in MESSAGES:
        send(rabbitmq_url, TOPIC, {"name": message}, message_id=message)
    mark_redelivered(handler, options)
    with consuming([handler], options):
        wait_until(lambda: InboxMessage.objects.count() == len(MESSAGES))

    assert set(InboxMessage.objects.values_list("state", "attempts")) == {(State.RECEIVED, 0)}
    read = []
    while leased := queries.claim(handler, 100, timedelta(minutes=1), options):
        read += [message.id for _lease, message in leased]
        assert all(queries.acknowledge(handler, [lease for lease, _message in leased], options).values())
    assert sorted(read) == MESSAGES
    assert set(InboxMessage.objects.values_list("state", flat=True)) == {State.DONE}
