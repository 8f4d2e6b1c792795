"""Ordered handlers on a real RabbitMQ: one consumer at a time takes a queue in, and the order outlasts its end."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from contextlib import ExitStack

import kombu
import pytest
from django.db import transaction

from inbox.consumer.topology import declare as declare_queues
from inbox.consumer.topology import queue_name
from inbox.models import InboxMessage, State
from outbox import Draft, publish_many
from tests.app.models import Effect
from tests.deliveries import TOPIC, effects, the_effect, wait_until
from tests.workers import EXCHANGE, broker_options, consuming, relay

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]


def declared(handler, options):
    with kombu.Connection(options.broker_url) as connection:
        return declare_queues(connection, handler, options)


def published(names, *, keys=4):
    """Committed messages; the number of each is its place in its key."""
    with transaction.atomic():
        publish_many([Draft(TOPIC, {"n": n}, biz_id=f"{n}", key=f"key-{n % keys}", strict_order=True) for n in names])


def sent(url, numbers, *, keys=4, **properties):
    """As a foreign producer sends them: in their order, on one connection."""
    with kombu.Connection(url) as connection:
        producer = kombu.Producer(connection.default_channel, kombu.Exchange(EXCHANGE, "topic", durable=True))
        for n in numbers:
            key = {"cloudEvents:orderingkey": f"key-{n % keys}"} if keys else {}
            headers = {"cloudEvents:id": f"{n}", "cloudEvents:source": "/tests", "cloudEvents:type": TOPIC, **key}
            producer.publish({"n": n}, routing_key=TOPIC, headers=headers, delivery_mode=2, **properties)


def by_key(keys=4):
    """The numbers of the effects, key by key, in the order of their commits."""
    found = defaultdict(list)
    for name in Effect.objects.order_by("pk").values_list("name", flat=True):
        number = int(name.rpartition("#")[2])
        found[number % keys].append(number)
    return found


def assert_each_once_and_in_order(count, keys=4):
    found = by_key(keys)
    assert {key: numbers for key, numbers in found.items() if numbers != sorted(set(numbers))} == {}
    assert sum(map(len, found.values())) == count


def lengths(server, handler, options):
    prefix = queue_name(handler, options)
    return {name: length for name, length in server.queue_lengths(options.broker_url).items() if name.startswith(prefix)}


class TestTheOrder:
    def test_what_the_outbox_published_in_order_takes_effect_in_order(self, handles, rabbitmq_server, rabbitmq_url):
        handler, options = handles(the_effect, ordered=True), broker_options(rabbitmq_url, CONCURRENCY=3)
        declared(handler, options)
        published(range(200))
        relay(rabbitmq_url)

        with consuming([handler], options), consuming([handler], options):
            wait_until(lambda: effects() == 200)
            wait_until(lambda: lengths(rabbitmq_server, handler, options) == {queue_name(handler, options): 0})

        assert_each_once_and_in_order(200)
        assert set(InboxMessage.objects.values_list("state", "ordered", "duplicates")) == {(State.DONE, True, 0)}

    def test_consumers_that_come_and_go_keep_it(self, handles, rabbitmq_url):
        handler, options = handles(the_effect, ordered=True), broker_options(rabbitmq_url, CONCURRENCY=2)
        declared(handler, options)
        total = 800
        sending = threading.Thread(target=sent, args=[rabbitmq_url, range(total)])
        sending.start()
        chance = random.Random(7)
        try:
            while InboxMessage.objects.count() < total:
                with ExitStack() as stack:
                    consumers = [stack.enter_context(consuming([handler], options)) for _ in range(2)]
                    seen = InboxMessage.objects.count()
                    some = min(total, seen + chance.randint(20, 120))
                    wait_until(lambda some=some: InboxMessage.objects.count() >= some)
                    assert consumers
        finally:
            sending.join()

        with consuming([handler], options):
            wait_until(lambda: effects() == total)

        assert_each_once_and_in_order(total)
        rows = InboxMessage.objects.order_by("pk").values_list("message_id", flat=True)
        assert [int(name) for name in rows] == list(range(total))
