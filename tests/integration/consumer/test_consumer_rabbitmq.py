"""The consumer on a real RabbitMQ: a delivery is acknowledged after the commit and not before, whatever fails in between."""

import threading
from collections import Counter
from contextlib import closing
from datetime import timedelta
from functools import partial

import amqp
import kombu
import pytest
from django.db import connections, transaction

from inbox.consumer.topology import queue_name
from inbox.models import InboxMessage
from inbox.states import State
from outbox import publish
from outbox.models import OutboxMessage
from tests.support.apps.effects.models import Effect
from tests.support.apps.worker import CHAINED, JOB
from tests.support.deliveries import A_WHILE, TOPIC, effects, the_effect, the_row
from tests.support.servers import FaultProxy
from tests.support.sql import executed
from tests.support.waiting import wait_until
from tests.support.workers import OF_THE_WORKERS, broker_options, consumers_of, consuming, declare, relay, send, send_and_handle

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

SHORT = timedelta(milliseconds=200)


@pytest.fixture
def consumer_process(a_process, rabbitmq_url):
    """Start `inbox_consume` with these options: `with consumer_process(MAX_ATTEMPTS=2) as process`."""
    declare(OF_THE_WORKERS, broker_options(rabbitmq_url))
    return partial(a_process, "inbox_consume", BACKOFF=(SHORT, SHORT))


def job(url, what, name="job"):
    send(url, JOB, {"do": what}, message_id=name)


def begun(name="job"):
    return Effect.objects.using("other").filter(name=f"begun {name}").exists()


def state(name="job"):
    return InboxMessage.objects.filter(message_id=name).values_list("state", flat=True).first()


class TestEndToEnd:
    def test_chain_of_handlers_keeps_its_correlation_id(self, handling, rabbitmq_url):
        got = []

        def first(message):
            publish("second", {}, biz_id="2")

        handlers = [handling(first), handling(got.append, topic="second")]
        with transaction.atomic():
            published = publish(TOPIC, {}, biz_id="1")
        relay(rabbitmq_url)

        with consuming(handlers, broker_options(rabbitmq_url)):
            wait_until(lambda: OutboxMessage.objects.filter(topic="second").exists())
            relay(rabbitmq_url)
            (message,) = wait_until(lambda: list(got))

        assert (message.correlation_id, message.causation_id) == (str(published.id), str(published.id))

    def test_handler_queue_is_a_durable_quorum_queue_with_no_practical_delivery_limit(
        self, handles, rabbitmq_url, rabbitmq_server
    ):
        handler, options = handles(the_effect), broker_options(rabbitmq_url)
        with consuming([handler], options):
            wait_until(lambda: queue_name(handler, options) in rabbitmq_server.queue_lengths(rabbitmq_url))
            vhost = rabbitmq_url.rpartition("/")[2]
            listed = rabbitmq_server.ctl("list_queues", "-q", "--vhost", vhost, "name", "type", "durable", "arguments")

        (line,) = [line for line in listed.splitlines() if line.startswith(queue_name(handler, options))]
        assert "\tquorum\ttrue\t" in line
        assert '{"x-delivery-limit",1000000000}' in line.replace(" ", "")


class TestForeignProducers:
    def test_message_with_timestamp_out_of_range_is_handled_and_delays_no_other(self, stored_beside_another, rabbitmq_url):
        """An AMQP timestamp has 64 bits of seconds. One that no datetime can hold is ignored."""
        row = stored_beside_another(lambda: send_with_timestamp(rabbitmq_url, 2**62))

        assert (row.state, row.attempts, row.last_error, row.created_at) == (State.DONE, 1, "", None)
        assert bytes(row.body) == b"{}"
        assert effects("odd") == 1


def is_bound(server, url):
    """Whether the exchange routes the topic to any queue."""
    return TOPIC in server.routing_keys(url)


def send_with_timestamp(url, seconds):
    """Send a message with an AMQP timestamp that a Python datetime cannot hold."""
    with kombu.Connection(url) as connection:
        channel = connection.default_channel
        message = amqp.Message(b"{}", content_type="application/json", message_id="odd", delivery_mode=2)
        serialised = message._serialize_properties

        def with_timestamp():
            flags, rest = int.from_bytes(serialised()[:2], "big"), serialised()[2:]
            # The timestamp stands behind the message id, the last of the properties set here.
            return (flags | 1 << 6).to_bytes(2, "big") + rest + seconds.to_bytes(8, "big")

        message._serialize_properties = with_timestamp
        channel.exchange_declare("outbox", "topic", durable=True, auto_delete=False)
        channel.basic_publish(message, exchange="outbox", routing_key=TOPIC)
        channel.queue_declare("read", exclusive=True)  # an answer means that the message was read before


class TestConnectionLoss:
    def test_ack_of_a_previous_connection_acknowledges_nothing(self, handling, rabbitmq_url, proxy, length):
        """The first message of the new connection has the delivery tag that the old ack was for."""
        holding, release = {"old": threading.Event(), "new": threading.Event()}, threading.Event()
        release_new = threading.Event()

        def handle(message):
            holding[message.id].set()
            assert (release if message.id == "old" else release_new).wait(A_WHILE)
            the_effect(message)

        handler, options = handling(handle), broker_options(proxy.through(rabbitmq_url))
        send(rabbitmq_url, TOPIC, {}, message_id="old")
        with consuming([handler], options) as consumer:
            assert holding["old"].wait(A_WHILE)
            proxy.refuse()
            proxy.cut()
            # Another client takes the old message, so that the new one is the first of the next connection.
            with kombu.Connection(rabbitmq_url) as connection:
                queue = kombu.Queue(queue_name(handler, options), channel=connection.default_channel)
                wait_until(queue.get).ack()
            send(rabbitmq_url, TOPIC, {}, message_id="new")
            proxy.accept()
            wait_until(lambda: consumer._subscriptions.unanswered == 1)
            release.set()
            assert holding["new"].wait(A_WHILE)
            wait_until(lambda: not consumer._answers)
            assert length(handler) == 1
            release_new.set()
            wait_until(lambda: length(handler) == 0)

        assert {effects("old"), effects("new")} == {1}

    def test_queue_deleted_under_the_consumer_is_declared_again(self, handles, rabbitmq_url):
        handler, options = handles(the_effect), broker_options(rabbitmq_url)
        name = queue_name(handler, options)
        with consuming([handler], options):
            wait_until(lambda: consumers_of(rabbitmq_url, name))
            with kombu.Connection(rabbitmq_url) as connection:
                connection.default_channel.queue_delete(name)
            wait_until(lambda: consumers_of(rabbitmq_url, name))
            send_and_handle(rabbitmq_url, TOPIC, "m")


class TestConsumerProcess:
    def test_session_that_ends_while_biz_id_queries_costs_no_message(self, handling, rabbitmq_url):
        def biz_id(message):
            """Its session ends twice: at once on the new session, too."""
            asked[message.id] += 1
            if asked[message.id] <= 2:
                executed("SELECT pg_terminate_backend(pg_backend_pid())")
            return message.id

        asked = Counter()
        handler, options = handling(the_effect, biz_id=biz_id), broker_options(rabbitmq_url)
        for number in range(5):
            send(rabbitmq_url, TOPIC, {}, message_id=f"message {number}")

        with consuming([handler], options):
            wait_until(lambda: effects() == 5)

        assert [*asked.values()] == [3] * 5
        assert {*InboxMessage.objects.values_list("state", "attempts")} == {(State.DONE, 1)}

    def test_handler_whose_runs_hang_leaves_a_thread_to_the_others_and_is_reported(self, consumer_process, rabbitmq_url):
        hanging = [f"hanging {number}" for number in range(5)]
        with consumer_process(CONCURRENCY=4, STUCK_AFTER=SHORT) as process:
            process.until(lambda: "consumer: receiving from 3 queues" in process.said())
            for name in hanging:
                job(rabbitmq_url, "never end", name)
            process.until(lambda: sum(begun(name) for name in hanging) >= 3)
            send(rabbitmq_url, CHAINED, {}, message_id="other")
            process.until(lambda: effects("chained other"))
            process.until(lambda: "each of the 3 threads that may run it has been running it for more than" in process.said())
            assert sum(begun(name) for name in hanging) == 3

    def test_watchdog_ends_a_process_whose_main_loop_is_silent(self, consumer_process, rabbitmq_url, length):
        with consumer_process(WATCHDOG=timedelta(seconds=6)) as process:
            job(rabbitmq_url, "silence the main loop")
            assert process.ends() == 70
            assert "silent" in process.said()
            process.start()
            process.until(lambda: length(OF_THE_WORKERS) == 0)

        assert state() == State.DONE

    def test_nothing_is_acknowledged_while_the_database_is_unavailable(
        self, consumer_process, rabbitmq_url, length, process_environment
    ):
        settings = connections["default"].settings_dict
        with (
            FaultProxy(settings["HOST"], int(settings["PORT"])) as database,
            consumer_process(variables={"DATABASE_URL": database.through(process_environment["DATABASE_URL"])}) as process,
        ):
            job(rabbitmq_url, "work", "before")
            process.until(lambda: state("before") == State.DONE and length(OF_THE_WORKERS) == 0)
            database.refuse()
            database.cut()
            job(rabbitmq_url, "work", "meanwhile")
            process.until(lambda: length(OF_THE_WORKERS) == 1)
            process.until(lambda: "The database 'default' is unavailable" in process.said())
            assert (length(OF_THE_WORKERS), state("meanwhile")) == (1, None)
            database.accept()
            process.until(lambda: state("meanwhile") == State.DONE and length(OF_THE_WORKERS) == 0)
            assert process.end() == 0

        row = the_row(message_id="meanwhile")
        assert (row.state, row.attempts, row.duplicates, effects("meanwhile")) == (State.DONE, 1, 0, 1)
        assert "The database 'default' is available again" in process.said()


def test_handler_queue_is_bound_to_its_topic_and_to_no_other(handling, rabbitmq_url):
    handler, options = handling(the_effect), broker_options(rabbitmq_url)

    with closing(kombu.Connection(rabbitmq_url)) as connection:
        queue = kombu.Queue(queue_name(handler, options), channel=connection.default_channel)
        send(rabbitmq_url, TOPIC + ".more", {}, message_id="other")
        send(rabbitmq_url, TOPIC, {}, message_id="ours")

        assert wait_until(queue.get).properties["message_id"] == "ours"
        assert queue.get() is None


class TestTopologyFaults:
    def test_binding_lost_with_its_exchange_is_declared_again(self, handles, rabbitmq_url, rabbitmq_server):
        handler, options = handles(the_effect), broker_options(rabbitmq_url)
        with consuming([handler], options) as consumer:
            wait_until(lambda: consumer._ticked_at)  # from here on only the next check sets the time of the last check
            consumer._subscriptions._checked_at = float("inf")  # it does not come before this has been looked at
            with closing(kombu.Connection(rabbitmq_url)) as connection:
                connection.channel().exchange_delete("outbox")
            assert not is_bound(rabbitmq_server, rabbitmq_url)
            consumer._subscriptions._checked_at = float("-inf")  # half a minute has passed

            wait_until(lambda: is_bound(rabbitmq_server, rabbitmq_url))
            send(rabbitmq_url, TOPIC, {}, message_id="m")

            wait_until(lambda: effects("m") == 1)
