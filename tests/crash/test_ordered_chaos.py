"""Ordered handlers while relays and consumers are killed: every effect once, every key in order.

ORDERED_CHAOS_MESSAGES and ORDERED_CHAOS_KEYS make it longer, for example 20000 messages on 500 keys.
"""

import json
import logging
import os
import random
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager, suppress
from itertools import zip_longest
from urllib.parse import urlsplit

import kombu
import pytest
from django.db import OperationalError, connection, transaction

from inbox.consumer.topology import queue_of
from inbox.models import InboxMessage
from inbox.states import State
from outbox import publish
from outbox.models import OutboxMessage
from tests.support.aliases import the_default_at
from tests.support.apps.effects.models import Effect
from tests.support.apps.ordered import CANCELLED, CREATED, STEP
from tests.support.crash.nemesis import Nemesis
from tests.support.deliveries import InAThread
from tests.support.servers import PgBouncer
from tests.support.sql import executed
from tests.support.waiting import wait_until
from tests.support.workers import EXCHANGE, STEP_OF_THE_WORKERS, Process, broker_options

MESSAGES = int(os.environ.get("ORDERED_CHAOS_MESSAGES", "600"))
KEYS = int(os.environ.get("ORDERED_CHAOS_KEYS", "50"))
CONSUMERS = 3
MESSAGES_BETWEEN_KILLS = 15
"""By progress and not by the clock: on any machine there are many kills, and between them something is handled."""
LONGEST_SECONDS = 900.0
ONE_IN = 50
"""One message in this many fails at its first attempt."""

KILLS = 26
"""In each of four circumstances: 104 in all."""
MESSAGES_AT_ONCE = 10
MOST_UNDER_WAY = 30
TIMES_FULL = 3
MANY_NACKED = 5
CONNECTIONS = 4
"""Of PgBouncer, to each database."""

logger = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.timeout(LONGEST_SECONDS + 100),
]


@pytest.fixture
def consumer(process_environment, rabbitmq_url, tmp_path):
    """Start consumer number n."""
    environment = {
        **process_environment,
        "DJANGO_SETTINGS_MODULE": "tests.support.apps.ordered.settings",
        "BROKER_URL": rabbitmq_url,
        "INBOX": json.dumps({"GROUP": "tests", "MAX_ATTEMPTS": 1000}),
    }
    return lambda number: Process(environment, tmp_path / f"consumer-{number}.log", "inbox_consume", "--concurrency", "2")


def send_all(url):
    """In one stream, so that the order of the numbers is the order of the queue."""
    with kombu.Connection(url) as connection:
        channel = connection.channel()
        queue_of(STEP_OF_THE_WORKERS, broker_options(url))(channel).declare()
        producer = kombu.Producer(channel, kombu.Exchange(EXCHANGE, "topic", durable=True))
        for number in range(MESSAGES):
            producer.publish(
                json.dumps({"fails": number % ONE_IN == 0}),
                routing_key=STEP,
                content_type="application/json",
                content_encoding="utf-8",
                delivery_mode=2,
                message_id=f"{number:06}",
                headers={"cloudEvents:orderingkey": f"key-{number % KEYS}"},
            )
        # An answer means that the broker has read all of them; the last ones of a connection closed at once may be lost.
        producer.exchange(channel).declare()


def handled():
    return InboxMessage.objects.filter(state=State.DONE).count()


def test_consumers_killed_again_and_again_have_every_effect_once_and_every_key_in_order(
    consumer, rabbitmq_server, rabbitmq_url
):
    send_all(rabbitmq_url)
    chance = random.Random(20_000)
    kills = 0
    with ExitStack() as stack:
        consumers = [stack.enter_context(consumer(number)) for number in range(CONSUMERS)]
        lives = dict.fromkeys(consumers, 1)
        begun_at = time.monotonic()
        while (so_far := handled()) < MESSAGES:
            enough = min(so_far + MESSAGES_BETWEEN_KILLS, MESSAGES)
            wait_until(lambda enough=enough: handled() >= enough, within=LONGEST_SECONDS)
            if at_work := [one for one in consumers if one.said().count("consumer: receiving from") == lives[one]]:
                victim = chance.choice(at_work)
                victim.kill()
                victim.ends()
                kills += 1
                victim.start()
                lives[victim] += 1
        seconds = round(time.monotonic() - begun_at)
        logger.info("%d messages on %d keys took %d s; %d kills.", MESSAGES, KEYS, seconds, kills)
        for one in consumers:
            one.until(lambda one=one: one.said().count("consumer: receiving from") == lives[one])
        # What the last victim had in hand is given to others, as duplicates.
        wait_until(lambda: set(rabbitmq_server.queue_lengths(rabbitmq_url).values()) == {0})
        for one in consumers:
            one.terminate()
        assert [one.ends() for one in consumers] == [0] * CONSUMERS

    assert kills >= MESSAGES // MESSAGES_BETWEEN_KILLS // 4
    assert_every_effect_once_and_in_order(MESSAGES, KEYS)


def assert_every_effect_once_and_in_order(messages, keys):
    of_keys = defaultdict(list)
    for name, key in Effect.objects.order_by("id").values_list("name", "detail"):
        of_keys[key].append(name)
    for key in range(keys):
        found, wanted = of_keys[f"key-{key}"], [f"{number:06}" for number in range(key, messages, keys)]
        wrong = next((place for place, (one, other) in enumerate(zip_longest(found, wanted)) if one != other), None)
        assert wrong is None, (
            f"key-{key}, from place {wrong}: {found[wrong : wrong + 15]}, and not {wanted[wrong : wrong + 15]}"
        )
    assert len(of_keys) == keys
    assert set(InboxMessage.objects.values_list("state", flat=True)) == {State.DONE}


# ------------------------------------------------------------------------------------------------- all the way, from publish()


@contextmanager
def nothing_else(world):
    """Kills are enough."""
    yield


@contextmanager
def a_queue_that_nacks(world):
    """Beside the handler's, which gets these messages all the same: one refusal is enough for a nack."""
    exchange = kombu.Exchange(EXCHANGE, "topic", durable=True)
    full = kombu.Queue("full", exchange, STEP, queue_arguments={"x-max-length": 1, "x-overflow": "reject-publish"})

    def nacked():
        return OutboxMessage.objects.filter(state="retrying").count()

    def refuse():
        for _ in range(TIMES_FULL):
            some_more = handled() + MOST_UNDER_WAY
            wait_until(lambda some_more=some_more: handled() >= some_more, within=LONGEST_SECONDS)
            with kombu.Connection(world.broker_url) as broker:
                bound = full(broker.channel())
                bound.declare()
                wait_until(
                    lambda: OutboxMessage.objects.filter(state="retrying").count() >= MANY_NACKED, within=LONGEST_SECONDS
                )
                bound.delete()

    with InAThread(refuse):
        yield
    # More than one attempt: the queue was there all the time, so the others were nacked.
    in_all = OutboxMessage.objects.filter(attempts__gt=1).count()
    logger.info("%d messages were nacked.", in_all)
    assert in_all >= TIMES_FULL * MANY_NACKED


@contextmanager
def serializable_transactions(world):
    """As a database administrator decides it: for every process, and for the producer."""
    name = connection.settings_dict["NAME"]
    executed(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    connection.close()
    try:
        assert executed("SHOW transaction_isolation") == [("serializable",)]
        yield
    finally:
        executed(f"ALTER DATABASE {name} RESET default_transaction_isolation")
        connection.close()


@contextmanager
def pgbouncer_in_transaction_mode(world):
    """Fewer connections than clients, for every process and for the producer."""
    settings = connection.settings_dict
    with PgBouncer(int(settings["PORT"] or 5432), CONNECTIONS, user=settings["USER"]) as pooler:
        for variable in ("DATABASE_URL", "OTHER_DATABASE_URL"):
            name = urlsplit(world.environment[variable]).path.lstrip("/")
            world.environment[variable] = pooler.url_of(name)
        with the_default_at(PORT=pooler.port):
            yield
            (used,) = [of for of in pooler.show("stats") if of["database"] == settings["NAME"]]
            # Every message takes more than one, and the test itself is no more than a part of them.
            assert used["total_xact_count"] > 2 * handled()
        world.end_all()


def again_until_committed(act):
    """As an application does under SERIALIZABLE."""
    while True:
        with suppress(OperationalError), transaction.atomic():
            return act()


def unless_refused(condition):
    """Under SERIALIZABLE a query may be refused, too: then nothing is known yet."""

    def met():
        with suppress(OperationalError):
            return condition()
        return False

    return met


def kill_under_load(world, fleet, publish_some):
    """Publish numbers while processes are killed, until all is handled; returns how many."""
    published = 0
    nemesis = Nemesis(world, fleet)
    kinds = {worker.command[0] for worker in fleet}
    with nemesis.at_work():
        while nemesis.kills.total() < KILLS or min(nemesis.kills[kind] for kind in kinds) < KILLS // 4:
            numbers = range(published, published + MESSAGES_AT_ONCE)
            again_until_committed(lambda numbers=numbers: publish_some(numbers))
            published += MESSAGES_AT_ONCE
            enough = published - MOST_UNDER_WAY
            world.wait_until(unless_refused(lambda enough=enough: handled() >= enough), "some more was handled")
    world.wait_until(unless_refused(world.is_quiet), "everything was handled")
    world.drain()
    figures = {"seed": world.seed, "messages": published, "kills": dict(nemesis.kills)}
    logger.info("%s", figures)
    assert not nemesis.own_ends, nemesis.own_ends
    return published


@pytest.mark.parametrize(
    ("keys", "circumstance"),
    [
        pytest.param(1, nothing_else, id="one hot key"),
        pytest.param(10, a_queue_that_nacks, id="a queue that nacks"),
        pytest.param(10, serializable_transactions, id="SERIALIZABLE"),
        pytest.param(10, pgbouncer_in_transaction_mode, id="PgBouncer"),
    ],
)
def test_relays_and_consumers_killed_again_and_again_have_every_effect_once_and_every_key_in_order(world, keys, circumstance):
    world.environment["DJANGO_SETTINGS_MODULE"] = "tests.support.apps.ordered.settings"
    world.inbox_options.update(GROUP="tests", MAX_ATTEMPTS=1000)

    def publish_some(numbers):
        for number in numbers:
            publish(STEP, {"fails": number % ONE_IN == 0}, key=f"key-{number % keys}", biz_id=f"{number:06}")

    with circumstance(world):
        fleet = [world.listening(), world.listening(), *(world.relay(outbox={"MAX_ATTEMPTS": 1000}) for _ in range(2))]
        assert_every_effect_once_and_in_order(kill_under_load(world, fleet, publish_some), keys)


@pytest.mark.parametrize("broker", ["world", "local_world"])
def test_an_object_is_never_cancelled_before_it_is_created_although_these_are_two_topics(request, broker):
    world = request.getfixturevalue(broker)
    world.environment["DJANGO_SETTINGS_MODULE"] = "tests.support.apps.ordered.settings"
    world.inbox_options.update(GROUP="tests", MAX_ATTEMPTS=1000)
    objects = 10

    def publish_some(numbers):
        """Each object is created, cancelled, created again and so on."""
        for number in numbers:
            topic = CANCELLED if number // objects % 2 else CREATED
            publish(topic, {"fails": number % ONE_IN == 0}, key=f"key-{number % objects}", biz_id=f"{number:06}")

    listening = [world.listening(), world.listening()] if broker == "world" else []
    fleet = [*listening, *(world.relay(outbox={"MAX_ATTEMPTS": 1000}) for _ in range(2))]
    published = kill_under_load(world, fleet, publish_some)

    assert_every_effect_once_and_in_order(published, objects)
    assert {*InboxMessage.objects.values_list("handler", "topic")} == {
        ("ordered.change", CREATED),
        ("ordered.change", CANCELLED),
    }
