import pytest
import redis

from inbox.consumer.topology import queue_name
from inbox.models import InboxMessage
from tests.support.deliveries import TOPIC, effects, the_effect
from tests.support.waiting import wait_until
from tests.support.workers import broker_options, consuming, send


@pytest.fixture
def is_empty(broker, request):
    """Does the broker hold no message for a handler, unacknowledged ones included?"""
    if broker.startswith("amqp"):
        length = request.getfixturevalue("length")
        return lambda handler: length(handler) == 0

    def is_empty(handler):
        with redis.Redis.from_url(broker) as client:
            return client.llen(queue_name(handler, broker_options(broker))) == client.hlen("unacked") == 0

    return is_empty


@pytest.fixture
def stored_beside_another(handling, broker, is_empty):
    """The row of an odd message, which the function sends before another one that is handled: `stored_beside_another(send)`."""

    def stored(send_odd):
        handler = handling(the_effect)
        send_odd()
        send(broker, TOPIC, {}, message_id="good")
        with consuming([handler], broker_options(broker)) as consumer:
            wait_until(lambda: effects("good") == 1)
            wait_until(lambda: is_empty(handler))
            assert not consumer._broker.ongoing
        return InboxMessage.objects.exclude(message_id="good").get()

    return stored
