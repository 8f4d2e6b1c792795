"""A full queue pauses its own topic only. Other topics are published, and this one is once its queue has room."""

import logging
from collections import Counter
from datetime import timedelta

import pytest
from django.db import transaction

from exactly_once.process.loop import StopRequest
from exactly_once.sql.now import DatabaseTime
from outbox import Draft, cancel, publish_many
from outbox.models import SHARDS, OutboxMessage, PausedTopic
from outbox.states import State
from tests.support.relaying import Queue, ids, in_threads, published, published_many, relay_for, relaying, states, waiting
from tests.support.servers import FaultProxy
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long, pytest.mark.usefixtures("short_pauses")]

BAD, GOOD = "shop.stock.full", "shop.order.placed"
REFUSED, OTHERS, ROOM = 3000, 300, 5
PAUSED, RESUMED = "refusals in a row", "resumed: the broker takes its messages again"
AFTER_A_REFUSAL = {"BACKOFF": (timedelta(seconds=0.3), timedelta(seconds=0.6)), "MAX_ATTEMPTS": 1000}


@pytest.fixture
def full(rabbitmq_url):
    """A queue of BAD that accepts a few messages and then refuses every one."""
    with Queue(rabbitmq_url, BAD, name="full", **FULL) as queue:
        yield queue


FULL = {"x-max-length": ROOM, "x-overflow": "reject-publish", "x-queue-type": "classic"}


def said(caplog, words):
    return [record for record in caplog.records if words in record.getMessage() and record.levelno == logging.WARNING]


def of(topic):
    return OutboxMessage.objects.filter(topic=topic)


def in_state(topic, state):
    return of(topic).filter(state=state).count()


def mixed(*, key=lambda n: ""):
    """A thousand of the refused messages first, then the others spread among the remaining ones."""
    refused = [Draft(BAD, {}, biz_id=str(n), key=key(n)) for n in range(REFUSED)]
    others = [Draft(GOOD, {}, biz_id=str(n)) for n in range(OTHERS)]
    drafts = refused[:1000]
    for n, other in enumerate(others):
        drafts += [other, *refused[1000 + 6 * n : 1006 + 6 * n]]
    drafts += refused[1000 + 6 * OTHERS :]
    with transaction.atomic():
        publish_many(drafts)


class TestFullQueue:
    def test_full_queue_pauses_its_own_topic_while_another_is_published_and_until_it_has_room(self, rabbitmq_url, full, caplog):
        mixed()
        with Queue(rabbitmq_url, GOOD) as others, relaying(rabbitmq_url, **AFTER_A_REFUSAL):
            assert len(others.take(OTHERS)) == OTHERS
            wait_until(lambda: in_state(BAD, State.PUBLISHED) == ROOM)
            wait_until(lambda: said(caplog, PAUSED))
            tries = len(nacks(caplog))
            wait_until(lambda: len(nacks(caplog)) > tries + 20)
            tried = of(BAD).filter(attempts__gt=0).count()
            assert tried < REFUSED / 2, "most of them were paused without having been sent"
            wait_until(lambda: of(BAD).filter(attempts=0, state=State.PAUSED, last_error="").exists())
        attempts = of(BAD).filter(attempts__gt=0).exclude(state=State.PUBLISHED).values_list("message_id", "attempts")
        assert {str(name): count for name, count in attempts} == dict(Counter(nacks(caplog)))
        assert (len(said(caplog, PAUSED)), said(caplog, RESUMED)) == (1, [])

        # From here on every message reaches this queue as well; those that the full one refuses, more than once.
        with Queue(rabbitmq_url, BAD, name="roomy") as roomy, relaying(rabbitmq_url, **AFTER_A_REFUSAL):
            arrived = full.take_all()
            full._bound.delete()
            wait_until(lambda: set(states()) == {State.PUBLISHED})
            arrived += roomy.take_all()

        assert len(set(ids(arrived))) == REFUSED
        assert of(BAD).filter(attempts=1).count() > REFUSED / 3, "those were published at their first attempt"
        assert [len(said(caplog, words)) for words in (PAUSED, RESUMED)] == [1, 1]

    def test_full_queue_keeps_the_order_of_every_key(self, rabbitmq_url, full):
        keys, each = 10, 15
        published_many(keys * each, BAD, biz_id=str, key=lambda n: f"key-{n % keys}")
        with relaying(rabbitmq_url, relays=2, BATCH_SIZE=50, **AFTER_A_REFUSAL):
            wait_until(lambda: State.RETRYING in states())
            arrived = []
            wait_until(lambda: arrived.extend(full.take_all()) or set(states()) == {State.PUBLISHED}, within=60)
            arrived += full.take_all()

        names = [int(message.headers["cloudEvents:bizid"]) for message in arrived]
        for key in range(keys):
            assert [name for name in names if name % keys == key] == list(range(key, keys * each, keys))


def nacks(caplog):
    """The message ids of the refused attempts that the relay logged."""
    return [
        str(record.args[0])
        for record in caplog.records
        if record.name == "outbox.relay.passes" and "at attempt" in record.getMessage() and record.args[1] == BAD
    ]


def test_lane_that_was_unavailable_sends_what_the_other_lane_paused_of_its_shards(rabbitmq_url):
    port = int(rabbitmq_url.rpartition("@")[2].partition("/")[0].partition(":")[2])
    stop = StopRequest()
    with FaultProxy("127.0.0.1", port) as proxy, Queue(rabbitmq_url, GOOD):
        away = relay_for(proxy.through(rabbitmq_url), stop, shards=range(0, SHARDS, 2), **AFTER_A_REFUSAL)
        other = relay_for(rabbitmq_url, stop, shards=range(1, SHARDS, 2), **AFTER_A_REFUSAL)
        away.siblings, other.siblings = [other], [away]
        with in_threads(away.run, other.run, stop=stop):
            for shard in range(SHARDS):
                published(GOOD, key=f"key-{shard}")
            wait_until(lambda: away.published and other.published and not waiting())
            proxy.refuse()
            proxy.cut()
            wait_until(lambda: not away.is_working)
            published_many(REFUSED, BAD)
            wait_until(lambda: in_state(BAD, State.PAUSED) > REFUSED / 2 and not in_state(BAD, State.READY))

            proxy.accept()
            with Queue(rabbitmq_url, BAD, name="late"):
                wait_until(lambda: set(states()) == {State.PUBLISHED})


def test_probe_of_a_paused_topic_overtakes_no_message_of_its_key(rabbitmq_url):
    """Also not where the messages before it are more than one pass sends of a key."""
    refused = published_many(40, BAD)
    with relaying(rabbitmq_url, **AFTER_A_REFUSAL):
        wait_until(lambda: in_state(BAD, State.PAUSED))
    with transaction.atomic():
        for message in refused:
            cancel(message.id)
    wait_until(lambda: PausedTopic.objects.filter(probe_at__lte=DatabaseTime()).exists())

    with Queue(rabbitmq_url, "#") as everything:
        with transaction.atomic():
            messages = published_many(300, GOOD, key="k") + published_many(1, BAD, key="k")
        with relaying(rabbitmq_url, **AFTER_A_REFUSAL):
            arrived = everything.take(301)

    assert ids(arrived).index(str(messages[-1].id)) == 300
    assert ids(arrived) == ids(messages)
