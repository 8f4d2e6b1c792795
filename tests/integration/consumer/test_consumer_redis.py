"""The consumer on Redis, through kombu: the broker promises less than RabbitMQ, the inbox promises the same."""

from __future__ import annotations

import json
import threading

import kombu
import pytest
import redis

from inbox.consumer.topology import queue_name
from inbox.models import InboxMessage
from inbox.states import State
from tests.support.apps.worker import JOB
from tests.support.deliveries import A_WHILE, TOPIC, effects, the_effect, the_row
from tests.support.waiting import wait_until
from tests.support.workers import OF_THE_WORKERS, Process, as_environment, broker_options, consuming, declare, send

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]


@pytest.fixture
def waiting(redis_url):
    """How many messages Redis holds for a handler, and how many are delivered and unacknowledged."""

    def count(handler):
        with redis.Redis.from_url(redis_url) as client:
            return client.llen(queue_name(handler, broker_options(redis_url))), client.hlen("unacked")

    return count


def test_message_with_unusual_headers_is_handled_and_delays_no_other(handles, redis_url, waiting):
    handler, options = handles(the_effect), broker_options(redis_url)
    declare(handler, options)
    send(redis_url, TOPIC, {}, message_id="odd", headers={"a\x00b": "c\x00d", "\ud800": [None]})
    send(redis_url, TOPIC, {}, message_id="good")

    with consuming([handler], options):
        wait_until(lambda: effects("good") == 1)
        wait_until(lambda: waiting(handler) == (0, 0))

    row = the_row(message_id="odd")
    assert (row.state, bytes(row.body), row.last_error) == (State.DONE, b"{}", "")
    assert row.headers == {"a\ufffdb": "c\ufffdd", "?": "[None]"}
    assert effects("odd") == 1


@pytest.mark.parametrize("encoding", ["utf-8", "binary", "no-such-encoding"])
def test_message_written_without_base64_is_handled_and_delays_no_other(handles, redis_url, waiting, encoding):
    handler, options = handles(the_effect), broker_options(redis_url)
    declare(handler, options)
    delivery = {"exchange": "outbox", "routing_key": TOPIC}
    written = {
        "body": '{"name": "Zoë"}',
        "content-encoding": encoding,
        "content-type": "application/json",
        "headers": {},
        "properties": {"message_id": "odd", "delivery_info": delivery, "delivery_tag": "1", "delivery_mode": 2, "priority": 0},
    }
    with redis.Redis.from_url(redis_url) as client:
        client.lpush(queue_name(handler, options), json.dumps(written))
    send(redis_url, TOPIC, {}, message_id="good")

    with consuming([handler], options):
        wait_until(lambda: effects("good") == 1)
        wait_until(lambda: waiting(handler) == (0, 0))

    row = the_row(message_id="odd")
    assert (row.state, bytes(row.body), row.last_error) == (State.DONE, '{"name": "Zoë"}'.encode(), "")
    assert effects("odd") == 1


@pytest.mark.parametrize(
    ("body", "stored", "reason"),
    [
        pytest.param("\ud800", b"\xed\xa0\x80", "is not JSON", id="lone surrogate"),
        pytest.param(None, b"None", "cannot be read", id="null"),
        pytest.param([1], b"\x01", "is not JSON", id="list"),
    ],
)
def test_body_that_is_not_text_is_a_dead_letter_and_the_consumer_goes_on(handles, redis_url, waiting, body, stored, reason):
    handler, options = handles(the_effect), broker_options(redis_url)
    declare(handler, options)
    written = {
        "body": body,
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {},
        "properties": {"message_id": "odd", "delivery_info": {"exchange": "outbox", "routing_key": TOPIC}, "delivery_tag": "1"},
    }
    with redis.Redis.from_url(redis_url) as client:
        client.lpush(queue_name(handler, options), json.dumps(written))
    send(redis_url, TOPIC, {}, message_id="good")

    with consuming([handler], options):
        wait_until(lambda: effects("good") == 1)
        wait_until(lambda: waiting(handler) == (0, 0))

    row = InboxMessage.objects.exclude(message_id="good").get()
    assert (row.state, bytes(row.body), effects()) == (State.DEAD, stored, 1)
    assert reason in row.last_error


def test_stopping_finishes_the_running_handler_and_returns_the_rest_to_redis(handles, redis_url, waiting):
    begun, go_on = threading.Event(), threading.Event()

    def handle(message):
        begun.set()
        assert go_on.wait(A_WHILE)
        the_effect(message)

    handler, options = handles(handle), broker_options(redis_url, CONCURRENCY=1)
    declare(handler, options)
    for number in range(5):
        send(redis_url, TOPIC, {}, message_id=f"m{number}")

    with consuming([handler], options) as consumer:
        assert begun.wait(A_WHILE)
        wait_until(lambda: waiting(handler) == (0, 5))
        consumer._stop.set()
        go_on.set()

    assert (effects(), waiting(handler)) == (1, (4, 0))
    with consuming([handler], options):
        wait_until(lambda: effects() == 5)
        wait_until(lambda: waiting(handler) == (0, 0))
    assert set(InboxMessage.objects.values_list("state", flat=True)) == {State.DONE}


def test_crash_between_commit_and_ack_has_no_second_effect(process_environment, redis_url, tmp_path):
    """Redis returns the message only after its visibility timeout; until then a resend must have no second effect."""
    environment = {
        **process_environment,
        **as_environment(
            INBOX={"BROKER_URL": redis_url, "GROUP": "tests", "EXCHANGE": "outbox"}, OUTBOX={"BROKER_URL": redis_url}
        ),
        "DJANGO_SETTINGS_MODULE": "tests.support.apps.worker.settings",
    }
    declare(OF_THE_WORKERS, broker_options(redis_url))
    with Process(environment, tmp_path / "consumer.log", "inbox_consume") as process:
        send(redis_url, JOB, {"do": "kill the process after the commit"}, message_id="job")
        assert process.ends() == 13
        process.start()
        with kombu.Connection(redis_url) as connection:
            connection.default_channel.qos.restore_visible(num=10)
        send(redis_url, JOB, {"do": "kill the process after the commit"}, message_id="job")
        process.until(lambda: InboxMessage.objects.filter(duplicates__gte=1).exists())
        process.terminate()
        assert process.ends() == 0

    assert (effects("job"), the_row().state) == (1, State.DONE)
