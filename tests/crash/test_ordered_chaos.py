"""Ordered handlers while relays and consumers are killed: every effect once, every key in order.

ORDERED_CHAOS_KILLS makes it longer.
"""

import logging
import os
from collections import defaultdict
from contextlib import contextmanager, suppress
from itertools import zip_longest
from urllib.parse import urlsplit

import kombu
import pytest
from django.db import OperationalError, connection, transaction

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
from tests.support.workers import EXCHANGE

SETTINGS = "tests.support.apps.ordered.settings"
LONGEST_SECONDS = 900.0
ONE_IN = 50
"""One message in this many fails at its first attempt."""

KILLS = int(os.environ.get("ORDERED_CHAOS_KILLS", "26"))
"""In each circumstance."""
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


def handled():
    return InboxMessage.objects.filter(state=State.DONE).count()


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
    ("broker", "keys", "circumstance", "topics"),
    [
        pytest.param("world", 1, nothing_else, [STEP], id="one hot key"),
        pytest.param("world", 10, a_queue_that_nacks, [STEP], id="a queue that nacks"),
        pytest.param("world", 10, serializable_transactions, [STEP], id="SERIALIZABLE"),
        pytest.param("world", 10, pgbouncer_in_transaction_mode, [STEP], id="PgBouncer"),
        # Each object is created, cancelled, created again and so on.
        pytest.param("world", 10, nothing_else, [CREATED, CANCELLED], id="two topics"),
        pytest.param("local_world", 10, nothing_else, [CREATED, CANCELLED], id="two topics, without a broker"),
    ],
)
def test_relays_and_consumers_killed_again_and_again_have_every_effect_once_and_every_key_in_order(
    request, broker, keys, circumstance, topics
):
    world = request.getfixturevalue(broker)
    world.inbox_options.update(GROUP="tests", MAX_ATTEMPTS=1000)

    def publish_some(numbers):
        for number in numbers:
            topic = topics[number // keys % len(topics)]
            publish(topic, {"fails": number % ONE_IN == 0}, key=f"key-{number % keys}", biz_id=f"{number:06}")

    with circumstance(world):
        listening = [world.listening(), world.listening()] if broker == "world" else []
        fleet = [*listening, *(world.relay(outbox={"MAX_ATTEMPTS": 1000}) for _ in range(2))]
        assert_every_effect_once_and_in_order(kill_under_load(world, fleet, publish_some), keys)
        assert {*InboxMessage.objects.values_list("topic", flat=True)} == {*topics}
