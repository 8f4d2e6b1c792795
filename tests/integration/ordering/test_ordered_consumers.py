"""Ordered handlers on a real RabbitMQ: one consumer at a time reads a queue, and the order survives its end."""

import logging
import random
from collections import defaultdict
from contextlib import suppress

import kombu
import pytest
from amqp.exceptions import ChannelError
from django.db import OperationalError, transaction

from inbox import Ordered
from inbox.consumer import subscriptions
from inbox.consumer.topology import Unusable, queue_name, queue_of, queues_of
from inbox.consumer.topology import declare as declare_queues
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.states import Outcome, State
from inbox.store import arrivals
from outbox import Draft, publish_many
from tests.support.deliveries import TOPIC, InAThread, effects, in_the_order_of_their_effects, the_effect
from tests.support.waiting import wait_until
from tests.support.workers import broker_options, consuming, declare, producing, relay, send, send_and_handle

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]


def declared(handler, options):
    with kombu.Connection(options.broker_url) as connection:
        return declare_queues(connection, handler, options)


def published(names, *, keys=4):
    """Committed messages; the number of each is its place in its key."""
    with transaction.atomic():
        publish_many([Draft(TOPIC, {"n": n}, biz_id=f"{n}", key=f"key-{n % keys}", strict_order=True) for n in names])


def sent(url, numbers, *, keys=4):
    """As a foreign producer sends them: in their order, on one connection."""
    with producing(url) as produce:
        for n in numbers:
            key = {"cloudEvents:orderingkey": f"key-{n % keys}"} if keys else {}
            headers = {"cloudEvents:id": f"{n}", "cloudEvents:source": "/tests", "cloudEvents:type": TOPIC, **key}
            produce({"n": n}, routing_key=TOPIC, headers=headers)


def by_key(keys=4):
    """The numbers of the effects, key by key, in the order of their commits."""
    found = defaultdict(list)
    for name in in_the_order_of_their_effects():
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


class TestOrder:
    def test_restarting_consumers_keeps_the_order(self, handling, rabbitmq_url):
        handler, options = handling(the_effect, ordered=True), broker_options(rabbitmq_url, CONCURRENCY=2)
        total = 800
        chance, restarts = random.Random(7), 0
        with InAThread(lambda: sent(rabbitmq_url, range(total))):
            while InboxMessage.objects.count() < total:
                restarts += 1
                with consuming([handler], options), consuming([handler], options):
                    seen = InboxMessage.objects.count()
                    some = min(total, seen + chance.randint(20, 120))
                    wait_until(lambda some=some: InboxMessage.objects.count() >= some)

        with consuming([handler], options):
            wait_until(lambda: effects() == total)

        assert restarts > 1, "one pair of consumers has read everything"
        assert_each_once_and_in_order(total)
        rows = InboxMessage.objects.order_by("pk").values_list("message_id", flat=True)
        assert [int(name) for name in rows] == list(range(total))

    def test_ordered_queue_is_read_by_one_consumer_at_a_time(self, handling, rabbitmq_url):
        handler, options = handling(the_effect, ordered=True), broker_options(rabbitmq_url)

        with consuming([handler], options) as first:
            sent(rabbitmq_url, range(10))
            wait_until(lambda: effects() == 10)
            with consuming([handler], options) as second:
                sent(rabbitmq_url, range(10, 40))
                wait_until(lambda: effects() == 40)

        assert (first.outcomes[Outcome.STORED], second.outcomes.total()) == (40, 0)
        assert_each_once_and_in_order(40)

    @pytest.mark.parametrize(
        ("error", "report"),
        [
            (OperationalError("server closed the connection unexpectedly"), "is unavailable (server closed"),
            (ArithmeticError("on purpose"), "unexpected error in the consumer while it received"),
        ],
        ids=["unavailable database", "unexpected error"],
    )
    def test_failed_storing_loses_no_message_and_keeps_the_order(
        self, handling, rabbitmq_url, monkeypatch, caplog, error, report
    ):
        handler, options = handling(the_effect, ordered=True), broker_options(rabbitmq_url)
        sent(rabbitmq_url, range(60))
        failures = iter(range(3))
        original = arrivals.admit

        def fails(*args, **kwargs):
            taken = original(*args, **kwargs)
            if next(failures, None) is not None:
                raise error
            return taken

        monkeypatch.setattr(arrivals, "admit", fails)
        with consuming([handler], options):
            wait_until(lambda: effects() == 60)

        assert_each_once_and_in_order(60)
        rows = InboxMessage.objects.order_by("pk").values_list("message_id", flat=True)
        assert [int(name) for name in rows] == list(range(60))
        assert report in caplog.text


class TestUnsuitableQueue:
    @pytest.fixture(autouse=True)
    def short_health_interval(self, monkeypatch):
        monkeypatch.setattr(subscriptions, "_HEALTH_SECONDS", 0.5)

    def test_queue_without_single_active_consumer_is_not_read_until_it_is_deleted(self, handles, rabbitmq_url, caplog):
        """The handler was not ordered before, so its queue feeds several consumers at once."""
        options = broker_options(rabbitmq_url)
        declare(handles(the_effect, name="changing"), options)
        registry.remove("changing")
        handler, other = handles(the_effect, ordered=True, name="changing"), handles(the_effect, topic="other", name="other")
        declare(other, options)
        sent(rabbitmq_url, [0])

        with consuming([handler, other], options) as consumer:
            wait_until(lambda: "without a single active consumer" in caplog.text)
            send(rabbitmq_url, "other", {}, message_id="other#1")
            wait_until(lambda: effects("other#1") == 1 and consumer.outcomes.total())
            assert consumer.outcomes.total() == 1
            with kombu.Connection(rabbitmq_url) as connection:
                connection.default_channel.queue_delete(queue_name(handler, options))
            wait_until(lambda: len(consumer._subscriptions.open) == 2)  # which is after it was bound
            assert existing_queues(rabbitmq_url, handler, options) == [queue_name(handler, options)]
            sent(rabbitmq_url, [0])
            wait_until(lambda: effects("/tests#0") == 1)

        assert [record.levelno for record in caplog.records if "single active consumer" in record.message] == [logging.ERROR]

    @pytest.mark.parametrize(
        "arguments",
        [
            {"x-queue-type": "classic", "x-max-length": 1000},
            {"x-queue-type": "quorum", "x-max-length": 1000, "x-overflow": "reject-publish"},
            {"x-queue-type": "classic"},
        ],
        ids=["classic with a maximum length", "quorum with a maximum length", "classic"],
    )
    def test_queue_without_single_active_consumer_is_not_read_whatever_else_differs(
        self, handles, rabbitmq_url, caplog, arguments
    ):
        """The broker names one of the arguments that differ, and it need not be this one."""
        handler = handles(the_effect, ordered=True)
        options = broker_options(rabbitmq_url)
        with kombu.Connection(rabbitmq_url) as connection:
            queue = kombu.Queue(queue_name(handler, options), durable=True, queue_arguments=arguments)
            queue(connection.default_channel).queue_declare()

        with consuming([handler], options) as consumer:
            wait_until(lambda: "without a single active consumer" in caplog.text)
            assert not consumer._subscriptions.open


class TestPartitions:
    def test_partitions_spread_the_keys_and_keep_the_order_of_each(self, handles, rabbitmq_server, rabbitmq_url):
        handler = handles(the_effect, ordered=Ordered(partitions=4))
        options = broker_options(rabbitmq_url, CONCURRENCY=3)
        declared(handler, options)
        published(range(300), keys=60)
        relay(rabbitmq_url)
        name = queue_name(handler, options)
        assert set(lengths(rabbitmq_server, handler, options)) == {f"{name}.{n}" for n in range(4)}
        assert min(lengths(rabbitmq_server, handler, options).values()) > 0

        with consuming([handler], options), consuming([handler], options):
            wait_until(lambda: effects() == 300)
            wait_until(lambda: not any(lengths(rabbitmq_server, handler, options).values()))

        assert_each_once_and_in_order(300, keys=60)
        assert InboxMessage.objects.filter(duplicates=0, state=State.DONE).count() == 300

    def test_all_messages_of_a_key_are_routed_to_one_partition(self, handles, rabbitmq_server, rabbitmq_url):
        handler, options = handles(the_effect, ordered=Ordered(partitions=3)), broker_options(rabbitmq_url)
        declared(handler, options)

        sent(rabbitmq_url, range(40), keys=1)
        declared(handler, options)
        sent(rabbitmq_url, range(40, 60), keys=1)

        wait_until(lambda: sum(lengths(rabbitmq_server, handler, options).values()) == 60)
        assert sorted(lengths(rabbitmq_server, handler, options).values()) == [0, 0, 60]

    def test_partitioned_handler_receives_messages_without_a_key(self, handles, rabbitmq_url):
        handler, options = handles(the_effect, ordered=Ordered(partitions=3)), broker_options(rabbitmq_url)
        declared(handler, options)
        sent(rabbitmq_url, range(10), keys=0)
        send(rabbitmq_url, TOPIC, {}, message_id="#11")

        with consuming([handler], options):
            wait_until(lambda: effects() == 11)

    def test_missing_consistent_hash_plugin_is_reported_and_stops_only_partitioned_handlers(
        self, handles, mortal_rabbitmq, rabbitmq_url, caplog, monkeypatch
    ):
        monkeypatch.setattr(subscriptions, "_HEALTH_SECONDS", 0.5)
        handler, options = handles(the_effect, ordered=Ordered(partitions=2)), broker_options(rabbitmq_url)
        other = handles(the_effect, topic="other", name="tests.other")
        declare(other, options)
        kind = '<<"x-consistent-hash">>'
        mortal_rabbitmq.evaluate(f"rabbit_registry:unregister(exchange, {kind}).")
        try:
            with consuming([handler, other], options) as consumer:
                wait_until(lambda: "rabbitmq-plugins enable rabbitmq_consistent_hash_exchange" in caplog.text)
                send_and_handle(rabbitmq_url, "other", "other#1")
                assert not consumer._broker.ongoing
                mortal_rabbitmq.evaluate(f"rabbit_registry:register(exchange, {kind}, rabbit_exchange_type_consistent_hash).")
                wait_until(lambda: not consumer._subscriptions._unusable)
                wait_until(lambda: len(consumer._subscriptions.open) == 3)
                sent(rabbitmq_url, [0])
                wait_until(lambda: effects("/tests#0") == 1)
        finally:
            mortal_rabbitmq.evaluate(f"rabbit_registry:register(exchange, {kind}, rabbit_exchange_type_consistent_hash).")

        assert caplog.text.count("rabbitmq-plugins enable") == 1

    def test_existing_exchange_of_another_type_is_refused_with_its_remedy(self, handles, rabbitmq_url):
        handler, options = handles(the_effect, ordered=Ordered(partitions=2)), broker_options(rabbitmq_url)
        with kombu.Connection(rabbitmq_url) as connection:
            connection.default_channel.exchange_declare(queue_name(handler, options), "fanout", durable=True, auto_delete=False)

        with pytest.raises(Unusable, match="Delete it"):
            declared(handler, options)

    @pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (1, 3), (3, 1)])
    def test_changed_number_of_partitions_is_refused_while_the_old_queues_exist(self, handles, rabbitmq_url, before, after):
        options = broker_options(rabbitmq_url)
        handler = handles(the_effect, ordered=Ordered(partitions=before), name="changing")
        declared(handler, options)
        declared(handler, options)
        registry.remove("changing")
        changed = handles(the_effect, ordered=Ordered(partitions=after), name="changing")

        with pytest.raises(Unusable, match=r"another number of partitions: .* Stop the relays"):
            declared(changed, options)

        delete_queues(handler, options)
        assert declared(changed, options) == ""

    @pytest.mark.parametrize("partitions", [1, 3])
    def test_a_further_topic_is_refused_while_the_queues_of_the_single_one_exist(self, handles, rabbitmq_url, partitions):
        """Their messages would be handled after later ones of the new queue."""
        options, ordered = broker_options(rabbitmq_url), Ordered(partitions=partitions)
        handler = handles(the_effect, topic="created", ordered=ordered, name="changing")
        declared(handler, options)
        registry.remove("changing")
        changed = handles(the_effect, topic=["created", "cancelled"], ordered=ordered, name="changing")

        with pytest.raises(Unusable, match=r"from when it had other topics, .*changing@created.* Stop the relays"):
            declared(changed, options)

        delete_queues(handler, options)
        assert declared(changed, options) == ""

    def test_partially_declared_partitions_are_completed(self, handles, rabbitmq_url):
        handler, options = handles(the_effect, ordered=Ordered(partitions=3)), broker_options(rabbitmq_url)
        with kombu.Connection(rabbitmq_url) as connection:
            queue_of(handler, options, 2)(connection.default_channel).declare()

        assert declared(handler, options) == ""
        assert existing_queues(rabbitmq_url, handler, options) == [queue.name for queue in queues_of(handler, options)]


def delete_queues(handler, options):
    """Delete its queues and the exchange before its partitions."""
    with kombu.Connection(options.broker_url) as connection:
        for queue in queues_of(handler, options):
            connection.default_channel.queue_delete(queue.name)
        connection.default_channel.exchange_delete(queue_name(handler, options))


def existing_queues(url, handler, options):
    """Those of its queues that exist with the right arguments."""
    with kombu.Connection(url) as connection:
        found = []
        for queue in queues_of(handler, options):
            with connection.channel() as channel, suppress(ChannelError):
                queue(channel).queue_declare(nowait=False, passive=True)
                queue(channel).queue_declare()
                found.append(queue.name)
        return found
