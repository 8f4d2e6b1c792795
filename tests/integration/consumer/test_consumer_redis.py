"""The consumer on Redis, through kombu: the broker promises less than RabbitMQ, the inbox promises the same."""

import json
import threading

import kombu
import pytest
import redis

from inbox.consumer.topology import queue_name
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.states import State
from tests.support.apps.worker import JOB
from tests.support.deliveries import A_WHILE, TOPIC, effects, the_effect, the_row
from tests.support.waiting import wait_until
from tests.support.workers import OF_THE_WORKERS, broker_options, consuming, declare, send, send_all

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]


@pytest.fixture
def broker(redis_url):
    return redis_url


@pytest.fixture
def waiting(redis_url):
    """How many messages Redis holds for a handler, and how many are delivered and unacknowledged."""

    def count(handler):
        with redis.Redis.from_url(redis_url) as client:
            return client.llen(queue_name(handler, broker_options(redis_url))), client.hlen("unacked")

    return count


@pytest.mark.long
def test_message_with_unusual_headers_is_handled_and_delays_no_other(stored_beside_another, broker):
    headers = {"a\x00b": "c\x00d", "\ud800": [None]}

    row = stored_beside_another(lambda: send(broker, TOPIC, {}, message_id="odd", headers=headers))

    assert (row.state, bytes(row.body), row.last_error) == (State.DONE, b"{}", "")
    assert row.headers == {"a\ufffdb": "c\ufffdd", "?": "[None]"}
    assert effects("odd") == 1


def write(broker, body, *, encoding="utf-8", **properties):
    """Put a message into the queue of the handler of `TOPIC`, as another program does."""
    written = {
        "body": body,
        "content-encoding": encoding,
        "content-type": "application/json",
        "headers": {},
        "properties": {
            "message_id": "odd",
            "delivery_info": {"exchange": "outbox", "routing_key": TOPIC},
            "delivery_tag": "1",
            **properties,
        },
    }
    [queue] = {queue_name(handler, broker_options(broker)) for handler in registry.all() if TOPIC in handler.topics}
    with redis.Redis.from_url(broker) as client:
        client.lpush(queue, json.dumps(written))


@pytest.mark.long
@pytest.mark.parametrize("encoding", ["utf-8", "binary", "no-such-encoding"])
def test_message_written_without_base64_is_handled_and_delays_no_other(stored_beside_another, broker, encoding):
    body = '{"name": "Zoë"}'

    row = stored_beside_another(lambda: write(broker, body, encoding=encoding, delivery_mode=2, priority=0))

    assert (row.state, bytes(row.body), row.last_error) == (State.DONE, '{"name": "Zoë"}'.encode(), "")
    assert effects("odd") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "stored", "reason"),
    [
        pytest.param("\ud800", b"\xed\xa0\x80", "is not JSON", id="lone surrogate"),
        pytest.param(None, b"None", "cannot be read", id="null"),
        pytest.param([1], b"\x01", "is not JSON", id="list"),
    ],
)
def test_body_that_is_not_text_is_a_dead_letter_and_the_consumer_goes_on(stored_beside_another, broker, body, stored, reason):
    row = stored_beside_another(lambda: write(broker, body))

    assert (row.state, bytes(row.body), effects()) == (State.DEAD, stored, 1)
    assert reason in row.last_error


@pytest.mark.long
def test_stopping_finishes_the_running_handler_and_returns_the_rest_to_redis(handling, redis_url, waiting):
    begun, go_on = threading.Event(), threading.Event()

    def handle(message):
        begun.set()
        assert go_on.wait(A_WHILE)
        the_effect(message)

    handler, options = handling(handle), broker_options(redis_url, CONCURRENCY=1)
    send_all(redis_url, TOPIC, [(f"m{number}", {}) for number in range(5)])

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


def test_crash_between_commit_and_ack_has_no_second_effect(a_process, redis_url):
    """Redis returns the message only after its visibility timeout; until then a resend must have no second effect."""
    declare(OF_THE_WORKERS, broker_options(redis_url))
    with a_process("inbox_consume") as process:
        send(redis_url, JOB, {"do": "kill the process after the commit"}, message_id="job")
        assert process.ends() == 13
        process.start()
        with kombu.Connection(redis_url) as connection:
            connection.default_channel.qos.restore_visible(num=10)
        send(redis_url, JOB, {"do": "kill the process after the commit"}, message_id="job")
        process.until(lambda: InboxMessage.objects.filter(duplicates__gte=1).exists())
        assert process.end() == 0

    assert (effects("job"), the_row().state) == (1, State.DONE)
