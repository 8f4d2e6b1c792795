"""Ordered handlers while their consumers are killed: every effect once, every key in order.

ORDERED_CHAOS_MESSAGES and ORDERED_CHAOS_KEYS make it longer, for example 20000 messages on 500 keys.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import time
from collections import defaultdict
from contextlib import ExitStack

import kombu
import pytest

from inbox.consumer.topology import queue_of
from inbox.handlers import Handler
from inbox.models import InboxMessage, State
from tests.support.apps.effects.models import Effect
from tests.support.apps.ordered import STEP
from tests.support.waiting import wait_until
from tests.support.workers import EXCHANGE, Process, broker_options

MESSAGES = int(os.environ.get("ORDERED_CHAOS_MESSAGES", "600"))
KEYS = int(os.environ.get("ORDERED_CHAOS_KEYS", "50"))
CONSUMERS = 3
MESSAGES_BETWEEN_KILLS = 15
"""By progress and not by the clock: on any machine there are many kills, and between them something is handled."""
LONGEST_SECONDS = 900.0
ONE_IN = 50
"""One message in this many fails at its first attempt."""

logger = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.proof,
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.timeout(LONGEST_SECONDS + 100),
    pytest.mark.usefixtures("_longer_traceback_timeout"),
]

HANDLER = Handler(name="testordered.step", topic=STEP, function=print, biz_id=None, using="default", ordered=True)
"""As far as its queue goes; the function lives in the processes."""


@pytest.fixture
def _longer_traceback_timeout():
    """The suite ends any test after some minutes; this test has a longer limit of its own."""
    faulthandler.dump_traceback_later(LONGEST_SECONDS + 200, exit=True)


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
        queue_of(HANDLER, broker_options(url))(channel).declare()
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


def handled():
    return InboxMessage.objects.filter(state=State.DONE).count()


def test_consumers_killed_again_and_again_have_every_effect_once_and_every_key_in_order(
    consumer, rabbitmq_server, rabbitmq_url, record_property
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
            if at_work := [one for one in consumers if one.said().count("Consuming") == lives[one]]:
                victim = chance.choice(at_work)
                victim.kill()
                victim.ends()
                kills += 1
                victim.start()
                lives[victim] += 1
        seconds = round(time.monotonic() - begun_at)
        logger.info("%d messages on %d keys took %d s; %d kills.", MESSAGES, KEYS, seconds, kills)
        record_property("seconds, kills", (seconds, kills))
        for one in consumers:
            one.until(lambda one=one: one.said().count("Consuming") == lives[one])
        # What the last victim had in hand is given to others, as duplicates.
        wait_until(lambda: set(rabbitmq_server.queue_lengths(rabbitmq_url).values()) == {0})
        for one in consumers:
            one.terminate()
        assert [one.ends() for one in consumers] == [0] * CONSUMERS

    done = list(Effect.objects.order_by("id").values_list("name", "detail"))
    of_keys = defaultdict(list)
    for name, key in done:
        of_keys[key].append(name)
    assert len(done) == MESSAGES
    assert kills >= MESSAGES // MESSAGES_BETWEEN_KILLS // 4
    assert of_keys == {f"key-{key}": [f"{number:06}" for number in range(key, MESSAGES, KEYS)] for key in range(KEYS)}
    assert set(InboxMessage.objects.values_list("state", flat=True)) == {State.DONE}
