"""The relay sends exactly the message that Celery would have sent for the same call, plus a message id."""

import base64
import json
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from types import SimpleNamespace
from uuid import UUID

import kombu
import pytest
import redis
from celery import chain, chord, group
from django.db import transaction
from kombu.common import Broadcast

from outbox.celery import OutboxTask
from tests.support.relaying import drained
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

TASK_ID = "0f7a2c1e-5b7d-4f0a-9c55-3a1f0a3f2a10"
SOON, LONG_AGO = datetime.now(tz=UTC) + timedelta(days=20), datetime(2020, 5, 17, 8, 30, tzinfo=UTC)
TOPICS = kombu.Exchange("topics", "topic")
OF_TOPICS = kombu.Queue("of-topics", TOPICS, "shop.#")
NAMED = [
    OF_TOPICS,
    kombu.Queue("celery", kombu.Exchange("celery"), "celery"),
    kombu.Queue("second", kombu.Exchange("second"), "second"),
    kombu.Queue("transient", kombu.Exchange("transient", delivery_mode="transient"), "transient"),
    kombu.Queue("prioritised", kombu.Exchange("prioritised"), "prioritised", max_priority=9),
]


class Rabbit:
    """Takes the messages of a queue, unchanged."""

    def __init__(self, url):
        self._connection = kombu.Connection(url)
        self._channel = self._connection.channel()

    def take(self, queue):
        taken = []
        while (message := self._channel.basic_get(queue, no_ack=True)) is not None:
            body = message.body if isinstance(message.body, bytes) else message.body.encode()
            where = {name: message.delivery_info[name] for name in ("exchange", "routing_key")}
            taken.append({**where, **message.properties, "body": body.decode("latin-1")})
        return taken

    def close(self):
        self._connection.release()


class Redis:
    """The same, of the lists that are the queues of kombu's Redis transport, one for each step of priority."""

    def __init__(self, url):
        self._client = redis.Redis.from_url(url)

    def take(self, queue):
        taken = []
        for key in sorted(self._client.keys(f"{queue}*")):
            while (message := self._client.rpop(key)) is not None:
                read = json.loads(message)
                del read["properties"]["delivery_tag"]
                taken.append({"key": key.decode(), **read})
        return taken

    def close(self):
        self._client.close()


@pytest.fixture
def queued(broker):
    """Take the messages of a queue of the broker: `queued(queue)`."""
    reader = Rabbit(broker) if broker.startswith("amqp") else Redis(broker)
    yield reader.take
    reader.close()


@pytest.fixture
def both_ways(broker, queued):
    """What one call puts into a queue, sent by Celery and carried by the outbox; the queue is declared by the first."""

    def compare(call, queue="celery"):
        call()
        by_celery = queued(queue)
        with transaction.atomic():
            call()
        assert queued(queue) == [], "nothing is sent before the commit"
        drained(broker)
        by_outbox = queued(queue)
        assert len(by_celery) == len(by_outbox) > 0
        return [
            SimpleNamespace(by_celery=one, by_outbox=other, carried_id=carried_id(other))
            for one, other in zip(by_celery, by_outbox, strict=True)
        ]

    return compare


def carried_id(message):
    """The only addition: the message id, by which the relay recognises a returned message."""
    return message.get("properties", message).pop("message_id")


def without_ids(message):
    """Replace the ids that each call generates."""
    if "key" in message:
        message["body"] = base64.b64decode(message["body"]).decode()
    text = json.dumps(message, default=str, sort_keys=True)
    return re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "an id", text)


OPTIONS = {
    "no option": {},
    "queue": {"queue": "second"},
    "priority": {"queue": "prioritised", "priority": 7},
    "priority 0": {"priority": 0},
    "headers": {"headers": {"tenant": "ä 🍰", "nested": {"none": None, "list": [1, 2.5, True, {"deep": "x"}]}, "big": 2**40}},
    "odd headers": {"headers": {"nul": "a\0b", "at": LONG_AGO, "amount": Decimal("1.10"), "raw": b"\xff\x00", "float": 1e16}},
    "past eta": {"eta": LONG_AGO},
    "expires": {"expires": SOON},
    "past eta and expires": {"eta": LONG_AGO, "expires": SOON},
    "pickle": {"serializer": "pickle"},
    "yaml": {"serializer": "yaml"},
    "compression": {"compression": "zlib"},
    "pickle and compression": {"serializer": "pickle", "compression": "bzip2"},
    "time limits": {"time_limit": 30, "soft_time_limit": 20},
    "ignore_result": {"ignore_result": True},
    "root, parent and group": {"root_id": "root", "parent_id": "parent", "group_id": "group", "group_index": 3},
    "shadow": {"shadow": "tests.shadow"},
    "argsrepr and kwargsrepr": {"argsrepr": "(secret)", "kwargsrepr": "{}"},
    "stamps": {"stamped_headers": ["stamp"], "stamp": ["a", "b"]},
    "reply_to": {"reply_to": "replies"},
    "retries": {"retries": 2},
    "transient message": {"delivery_mode": "transient"},
    "transient queue": {"queue": "transient"},
    "topic exchange": {"exchange": "topics", "routing_key": "shop.order", "exchange_type": "topic", "declare": [OF_TOPICS]},
    "queue of a topic exchange": {"queue": "of-topics", "routing_key": "shop.payment"},
    "exchange object": {"exchange": TOPICS, "routing_key": "shop.x", "exchange_type": "topic", "declare": [OF_TOPICS]},
    "AMQP properties": {"type": "of AMQP", "app_id": "shop", "timestamp": 1_600_000_000},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_outbox_sends_every_option_of_a_call_as_celery_does(name, broker, make, both_ways):
    app = make(broker, task_queues=NAMED)
    options = OPTIONS[name]
    queue = options.get("queue", "of-topics" if "exchange" in options else "celery")

    [message] = both_ways(
        lambda: app.tasks["tests.elaborate"].apply_async([1, "ä"], {"n": [None]}, task_id=TASK_ID, **options), queue
    )

    assert seconds_left(message.by_outbox) == pytest.approx(seconds_left(message.by_celery), abs=30)
    assert without_time_to_live(message.by_outbox) == without_time_to_live(message.by_celery)
    assert message.carried_id == TASK_ID


def seconds_left(message):
    """The broker's time to live; Celery counts it from the call."""
    return int(message.get("properties", message).get("expiration", 0)) / 1000


def without_time_to_live(message):
    message.get("properties", message).pop("expiration", None)
    headers = message.get("application_headers") or message["headers"]
    # A task's own `expires`, in seconds, is another instant at each call.
    if headers["expires"] and headers["expires"] != SOON.isoformat():
        headers["expires"] = "some time"
    return message


LINKS = {
    "link": lambda tasks: tasks["tests.add"].apply_async([1, 2], link=tasks["tests.add"].s(3)),
    "several links": lambda tasks: tasks["tests.add"].apply_async(
        [1, 2], link=[tasks["tests.add"].s(3), tasks["tests.add"].s(4)], link_error=tasks["tests.write"].si("failed")
    ),
    "chain": lambda tasks: chain(tasks["tests.add"].s(1, 2), tasks["tests.add"].s(3), tasks["tests.add"].s(4)).apply_async(),
    "group": lambda tasks: group(tasks["tests.add"].s(n, n) for n in range(3)).apply_async(),
    "chord": lambda tasks: chord([tasks["tests.add"].s(n, n) for n in range(3)])(tasks["tests.total"].s()),
    "group in a chain": lambda tasks: (
        tasks["tests.add"].s(1, 2) | group(tasks["tests.add"].s(1), tasks["tests.add"].s(2)) | tasks["tests.total"].s()
    ).delay(),
    "signature": lambda tasks: tasks["tests.add"].s(1, 2).set(priority=2, headers={"tenant": "acme"}).delay(),
}


@pytest.mark.parametrize("name", LINKS)
def test_outbox_sends_links_and_canvas_as_celery_does(name, app, both_ways):
    messages = both_ways(lambda: LINKS[name](app.tasks))

    for message in messages:
        assert without_ids(message.by_outbox) == without_ids(message.by_celery)


@pytest.mark.parametrize(
    "settings",
    [
        {"task_default_queue": "usual"},
        {"task_default_queue": "usual", "task_default_exchange": "usual-x", "task_default_routing_key": "usual-key"},
        {"task_routes": {"tests.*": {"queue": "usual", "priority": 4}}},
        {"task_serializer": "pickle", "task_compression": "zlib", "task_routes": {"tests.add": "usual"}},
        {"task_default_queue": "usual", "task_default_delivery_mode": 1, "task_ignore_result": True},
        {"task_default_queue": "usual", "task_default_exchange": "usual", "task_default_exchange_type": "topic"},
    ],
    ids=str,
)
def test_outbox_follows_the_settings_of_the_app_as_celery_does(settings, broker, make, both_ways):
    app = make(broker, **settings)

    [message] = both_ways(lambda: app.tasks["tests.add"].apply_async([1, 2], task_id=TASK_ID), "usual")

    assert message.by_outbox == message.by_celery
    assert UUID(message.carried_id) == UUID(TASK_ID)


@pytest.mark.parametrize("broker", ["rabbitmq", "redis"], indirect=True)
def test_broadcast_call_reaches_its_queues(broker, make):
    """Celery's own call does not on Redis: a process that has not declared an exchange treats it as a direct one."""
    app = make(broker, task_queues=[Broadcast("broadcast", queue="broadcast-1")])
    [broadcast] = app.amqp.queues.values()
    arrived = []
    with kombu.Connection(broker) as connection:

        def listen():
            with suppress(TimeoutError):
                connection.drain_events(timeout=0.1)
            return bool(arrived)

        with connection.Consumer(broadcast, on_message=lambda message: (arrived.append(message), message.ack())):
            listen()  # Redis's transport subscribes when it first looks
            with transaction.atomic():
                app.tasks["tests.add"].apply_async([1, 2], queue="broadcast", task_id=TASK_ID)
            drained(broker)
            wait_until(listen)

    [message] = arrived
    assert (message.headers["id"], message.delivery_info["exchange"]) == (TASK_ID, "broadcast")


def test_outbox_task_as_task_cls_sends_built_in_tasks_through_the_outbox(broker, make, both_ways):
    app = make(broker, task_cls=OutboxTask)
    call = app.tasks["tests.add"].chunks([(1, 2), (3, 4), (5, 6)], 2).group().apply_async

    messages = both_ways(call)

    assert [without_ids(message.by_outbox) for message in messages] == [without_ids(message.by_celery) for message in messages]


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_expires_beyond_the_limit_of_rabbitmq_stays_in_the_headers_only(app, broker, queued):
    with kombu.Connection(broker) as connection:
        kombu.Queue("celery")(connection.default_channel).declare()
    with transaction.atomic():
        app.tasks["tests.add"].apply_async([1, 2], expires=timedelta(days=100).total_seconds())
    drained(broker)

    [message] = queued("celery")
    assert "expiration" not in message
    assert message["application_headers"]["expires"] is not None
