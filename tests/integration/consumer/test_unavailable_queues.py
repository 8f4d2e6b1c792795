"""A queue or topic that the broker forbids or has lost stops its own handler only, and the log says what to do."""

import logging
from datetime import timedelta

import pytest

from exactly_once.process.loop import StopRequest, Watchdog
from inbox.consumer.consumer import Consumer
from inbox.consumer.topology import queue_name
from tests.support.deliveries import TOPIC, effects, the_effect
from tests.support.waiting import wait_until
from tests.support.workers import EXCHANGE, broker_options, consuming, declare, send, send_and_handle

pytestmark = [pytest.mark.django_db(transaction=True)]

FORBIDDEN = "shop.secret"
ALL_BUT_IT = rf"^(?!.*{FORBIDDEN}).*$"


@pytest.fixture
def permit(rabbitmq_server, rabbitmq_url):
    """From now on the broker's user has these rights, as patterns of the names that it may configure, write and read."""
    vhost = rabbitmq_url.rpartition("/")[2]

    def call(function, *texts):
        given = ", ".join(f'<<"{text}">>' for text in (*texts, "guest"))
        rabbitmq_server.evaluate(f"rabbit_auth_backend_internal:{function}({given}).")

    def permit(configure=".*", read=".*", topics=".*"):
        call("set_permissions", "guest", vhost, configure, ".*", read)
        call("set_topic_permissions", "guest", vhost, EXCHANGE, ".*", topics)

    return permit


@pytest.fixture(autouse=True)
def logged(caplog):
    caplog.set_level(logging.INFO)


@pytest.mark.parametrize("right", ["configure", "read", "topics"])
def test_handler_whose_queue_or_topic_is_forbidden_stops_no_other_handler(handles, rabbitmq_url, permit, caplog, right):
    options = broker_options(rabbitmq_url)
    forbidden = handles(the_effect, name="tests.forbidden", topic=FORBIDDEN)
    permitted = handles(the_effect, name="tests.permitted")
    permit(**{right: ALL_BUT_IT})

    with consuming([forbidden, permitted], options) as consumer:
        wait_until(lambda: "receiving from 1 queue at" in caplog.text)
        for name in ("a", "b"):
            send(rabbitmq_url, TOPIC, {}, message_id=name)
        wait_until(lambda: effects() == 2)
        assert [handler.name for handler in consumer.activity().handlers] == ["tests.permitted"]

        permit()
        send(rabbitmq_url, TOPIC, {}, message_id="c")
        consumer._subscriptions._checked_at = float("-inf")  # half a minute has passed
        wait_until(lambda: "receiving from 2 queues" in caplog.text)
        send(rabbitmq_url, FORBIDDEN, {}, message_id="d")
        wait_until(lambda: effects("c") == effects("d") == 1)

    [report] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "tests.forbidden" in report
    assert "set_permissions" in report
    assert "The broker refuses" not in caplog.text


def test_drain_ends_beside_a_forbidden_queue(handles, rabbitmq_url, permit, caplog):
    options = broker_options(rabbitmq_url)
    forbidden = handles(the_effect, name="tests.forbidden", topic=FORBIDDEN)
    permitted = handles(the_effect, name="tests.permitted")
    declare(permitted, options)
    send(rabbitmq_url, TOPIC, {}, message_id="m")
    permit(read=ALL_BUT_IT)

    watchdog = Watchdog(limit=timedelta(hours=1))
    Consumer([forbidden, permitted], options, stop=StopRequest(), watchdog=watchdog).run(drain=True)

    assert effects("m") == 1
    assert queue_name(forbidden, options) in caplog.text


def test_checking_a_forbidden_queue_repeatedly_leaves_no_channel_open(handles, rabbitmq_server, rabbitmq_url, permit, caplog):
    options = broker_options(rabbitmq_url)
    forbidden = handles(the_effect, name="tests.forbidden", topic=FORBIDDEN)
    permitted = handles(the_effect, name="tests.permitted")
    permit(read=ALL_BUT_IT)

    with consuming([forbidden, permitted], options) as consumer:
        wait_until(lambda: "receiving from 1 queue at" in caplog.text)
        for _ in range(5):
            consumer._subscriptions._checked_at = float("-inf")  # half a minute has passed
            wait_until(lambda: consumer._subscriptions._checked_at > 0 and consumer._subscriptions._unusable)
        # That of the other queue. The broker may list a closed one for a moment.
        wait_until(lambda: rabbitmq_server.channels(rabbitmq_url) == 1)


def test_queue_that_has_lost_its_majority_stops_no_other_handler(handles, rabbitmq_server, rabbitmq_url, caplog):
    options = broker_options(rabbitmq_url)
    lost = handles(the_effect, name="tests.lost", topic=FORBIDDEN)
    sound = handles(the_effect, name="tests.sound")
    declare(lost, options)
    resource = f'rabbit_misc:r(<<"{rabbitmq_url.rpartition("/")[2]}">>, queue, <<"{queue_name(lost, options)}">>)'
    member = f"begin {{ok, Q}} = rabbit_amqqueue:lookup({resource}), amqqueue:get_pid(Q) end"
    rabbitmq_server.evaluate(f"ra:stop_server(quorum_queues, {member}).")

    with consuming([lost, sound], options) as consumer:
        wait_until(lambda: "receiving from 1 queue at" in caplog.text)
        send_and_handle(rabbitmq_url, TOPIC, "a")

        rabbitmq_server.evaluate(f"ra:restart_server(quorum_queues, {member}).")
        consumer._subscriptions._checked_at = float("-inf")  # half a minute has passed
        wait_until(lambda: "receiving from 2 queues" in caplog.text)

    [report] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert queue_name(lost, options) in report
    assert "quorum_status" in report


@pytest.mark.long
def test_queue_that_hangs_stops_no_other_handler(handles, rabbitmq_server, rabbitmq_url, caplog):
    """Its Ra server is suspended: the broker answers that the queue has no subscription, and a new one is not answered."""
    options = broker_options(rabbitmq_url)
    hangs, sound = handles(the_effect, name="tests.hangs", topic=FORBIDDEN), handles(the_effect, name="tests.sound")
    resource = f'rabbit_misc:r(<<"{rabbitmq_url.rpartition("/")[2]}">>, queue, <<"{queue_name(hangs, options)}">>)'
    server = f"begin {{ok, Q}} = rabbit_amqqueue:lookup({resource}), {{Name, _}} = amqqueue:get_pid(Q), whereis(Name) end"

    with consuming([hangs, sound], options) as consumer:
        wait_until(lambda: "receiving from 2 queues" in caplog.text)
        rabbitmq_server.evaluate(f"sys:suspend({server}).")
        try:
            consumer._subscriptions._checked_at = float("-inf")  # half a minute has passed
            wait_until(lambda: "receiving from 1 queue at" in caplog.text)
            consumer._subscriptions._checked_at = float("-inf")
            send_and_handle(rabbitmq_url, TOPIC, "a")
            lost = caplog.text.count("The broker is unavailable")
            wait_until(lambda: consumer._subscriptions._checked_at > 0 and consumer._subscriptions._unusable)
            send_and_handle(rabbitmq_url, TOPIC, "b")
        finally:
            rabbitmq_server.evaluate(f"sys:resume({server}).")
        consumer._subscriptions._checked_at = float("-inf")
        wait_until(lambda: caplog.text.count("receiving from 2 queues") == 2)
        send_and_handle(rabbitmq_url, FORBIDDEN, "c")

    assert lost == caplog.text.count("The broker is unavailable") == 1
    [report] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert queue_name(hangs, options) in report
