"""A full queue pauses its own topic only. Other topics are published, and this one is once its queue has room."""

import logging
from collections import Counter
from datetime import timedelta
from functools import partial

import pytest
from django.db import transaction

from exactly_once.process.loop import StopRequest
from exactly_once.sql.now import DatabaseTime
from outbox import Draft, cancel, publish_many
from outbox.models import SHARDS, OutboxMessage, PausedTopic
from outbox.relay import breaker
from outbox.states import State
from tests.support.fakes.amqp_peer import FakeAmqpPeer
from tests.support.relaying import (
    Queue,
    drained,
    ids,
    in_threads,
    published,
    relay_for,
    relaying,
    state_of,
    states,
    waiting,
)
from tests.support.servers import FaultProxy
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

BAD, GOOD = "shop.stock.full", "shop.order.placed"
REFUSED, OTHERS, ROOM = 3000, 300, 5
PAUSED, RESUMED = "refusals in a row", "resumed: the broker takes its messages again"
AFTER_A_REFUSAL = {"RETRY_BASE": timedelta(seconds=0.3), "RETRY_CAP": timedelta(seconds=0.6), "MAX_ATTEMPTS": 1000}


@pytest.fixture
def short_pauses(monkeypatch):
    """The number of pauses of an hour's outage, within some seconds."""
    monkeypatch.setattr(breaker, "_FIRST_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(breaker, "_LONGEST_PAUSE_SECONDS", 0.4)


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


@pytest.mark.usefixtures("short_pauses")
class TestFullQueue:
    def test_full_queue_pauses_its_own_topic_while_another_is_published(self, rabbitmq_url, full, caplog):
        mixed()
        with Queue(rabbitmq_url, GOOD) as others, relaying(rabbitmq_url, **AFTER_A_REFUSAL):
            arrived = others.take(OTHERS)
            wait_until(lambda: in_state(BAD, State.PUBLISHED) == ROOM)

            assert len(arrived) == OTHERS
            wait_until(lambda: said(caplog, PAUSED))
            tried = of(BAD).filter(attempts__gt=0).count()
            assert tried < REFUSED / 2, "most of them were paused without having been sent"
            wait_until(lambda: of(BAD).filter(attempts=0, state=State.PAUSED, last_error="").exists())

    def test_paused_topic_counts_attempts_only_for_messages_that_were_sent(self, rabbitmq_url, full, caplog):
        mixed()
        with relaying(rabbitmq_url, **AFTER_A_REFUSAL):
            wait_until(lambda: said(caplog, PAUSED))
            tries = len(nacks(caplog))
            wait_until(lambda: len(nacks(caplog)) > tries + 20)
        attempts = dict(of(BAD).exclude(state=State.PUBLISHED).values_list("message_id", "attempts"))

        tried = Counter(nacks(caplog))
        assert {str(name): count for name, count in attempts.items() if count} == dict(tried)

    def test_all_messages_are_published_once_the_queue_has_room(self, rabbitmq_url, full, caplog):
        mixed()
        with Queue(rabbitmq_url, GOOD) as others, relaying(rabbitmq_url, **AFTER_A_REFUSAL):
            others.take(OTHERS)
            wait_until(lambda: said(caplog, PAUSED))
            # From here on every message reaches this queue as well; those that the full one refuses, more than once.
            with Queue(rabbitmq_url, BAD, name="roomy") as roomy:
                arrived = full.take_all()
                full._bound.delete()
                wait_until(lambda: set(states()) == {State.PUBLISHED})
                arrived += roomy.take_all()

        assert len(set(ids(arrived))) == REFUSED
        assert of(BAD).filter(attempts=1).count() > REFUSED / 3, "those were published at their first attempt"

    def test_pause_is_logged_once_when_it_begins_and_once_when_it_ends(self, rabbitmq_url, full, caplog):
        with transaction.atomic():
            publish_many([Draft(BAD, {}) for _ in range(200)])
        with relaying(rabbitmq_url, **AFTER_A_REFUSAL):
            wait_until(lambda: said(caplog, PAUSED))
            tries = len(nacks(caplog))
            wait_until(lambda: len(nacks(caplog)) > tries + 10)
            assert len(said(caplog, PAUSED)) == 1
            assert not said(caplog, RESUMED)

            with Queue(rabbitmq_url, BAD, name="second way out"):
                full._bound.delete()
                wait_until(lambda: set(states()) == {State.PUBLISHED})

        assert [len(said(caplog, words)) for words in (PAUSED, RESUMED)] == [1, 1]

    def test_full_queue_keeps_the_order_of_every_key(self, rabbitmq_url, full):
        keys, each = 10, 15
        with transaction.atomic():
            publish_many([Draft(BAD, {}, biz_id=str(n), key=f"key-{n % keys}") for n in range(keys * each)])
        with relaying(rabbitmq_url, relays=2, BATCH_SIZE=50, **AFTER_A_REFUSAL):
            wait_until(lambda: State.RETRYING in states())
            arrived = []
            wait_until(lambda: arrived.extend(full.take_all()) or set(states()) == {State.PUBLISHED}, within=60)
            arrived += full.take_all()

        names = [int(message.headers["cloudEvents:bizid"]) for message in arrived]
        for key in range(keys):
            assert [name for name in names if name % keys == key] == list(range(key, keys * each, keys))


def test_backlog_of_20000_refused_messages_is_paused_once_while_others_are_published():
    """With the pauses of production. A paused message must not become ready repeatedly."""
    with transaction.atomic():
        publish_many([Draft(BAD, {}) for _ in range(20_000)])
    with FakeAmqpPeer() as peer:
        peer.script = lambda message: [partial(peer.nack if message.routing_key == BAD else peer.ack, message)]
        with relaying(peer.url):
            wait_until(lambda: not in_state(BAD, State.READY))
            paused = of(BAD).filter(state=State.PAUSED)
            before = dict(paused.values_list("pk", "available_at"))
            assert len(before) > 19_000
            for _ in range(30):
                message = published(GOOD)
                wait_until(lambda message=message: state_of(message) == State.PUBLISHED)
            after = dict(paused.values_list("pk", "available_at"))

    moved = sum(1 for position, available_at in before.items() if after.get(position) != available_at)
    assert moved < 200, "a few were tried"


def nacks(caplog):
    """The message ids of the refused attempts that the relay logged."""
    return [
        str(record.args[0])
        for record in caplog.records
        if record.name == "outbox.relay.passes" and "at attempt" in record.getMessage() and record.args[1] == BAD
    ]


@pytest.mark.usefixtures("short_pauses")
def test_topic_without_a_queue_is_paused_and_published_once_a_queue_is_bound(rabbitmq_url, monkeypatch, caplog):
    monkeypatch.setattr(breaker, "_LONGEST_PAUSE_SECONDS", 5.0)  # few attempts, however long it takes to bind the queue
    with transaction.atomic():
        publish_many([Draft(BAD, {}) for _ in range(300)])
        publish_many([Draft(GOOD, {}) for _ in range(30)])

    with Queue(rabbitmq_url, GOOD) as others, relaying(rabbitmq_url, **AFTER_A_REFUSAL):
        others.take(30)
        wait_until(lambda: said(caplog, PAUSED))
        with Queue(rabbitmq_url, BAD, name="late") as late:
            assert len(late.take(300)) == 300
            wait_until(lambda: set(states()) == {State.PUBLISHED})

    assert of(BAD).filter(attempts__gt=2).count() < 100


@pytest.mark.usefixtures("short_pauses")
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
            with transaction.atomic():
                publish_many([Draft(BAD, {}) for n in range(REFUSED)])
            wait_until(lambda: in_state(BAD, State.PAUSED) > REFUSED / 2 and not in_state(BAD, State.READY))

            proxy.accept()
            with Queue(rabbitmq_url, BAD, name="late"):
                wait_until(lambda: set(states()) == {State.PUBLISHED})


@pytest.mark.every_database
@pytest.mark.usefixtures("short_pauses")
def test_paused_topic_holds_a_key_that_it_shares_with_another_topic():
    """The order of a key spans its topics."""
    with FakeAmqpPeer() as peer:
        peer.script = lambda m: [lambda: (peer.nack if m.routing_key == BAD and not room else peer.ack)(m)]
        room = []
        with transaction.atomic():
            publish_many([Draft(BAD, {}) for _ in range(40)])
        with relaying(peer.url, **AFTER_A_REFUSAL):
            wait_until(lambda: in_state(BAD, State.PAUSED))
            first = published(BAD, key="k")
            second = published(GOOD, key="k")
            free = published(GOOD)
            wait_until(lambda: str(free.id) in ids(list(peer.published)))
            assert str(second.id) not in ids(list(peer.published))
            room.append(True)
            wait_until(lambda: set(states()) == {State.PUBLISHED})

        sent = ids(peer.published)
        assert sent.index(str(second.id)) > max(n for n, name in enumerate(sent) if name == str(first.id))


@pytest.mark.every_database
@pytest.mark.usefixtures("short_pauses")
def test_probe_of_a_paused_topic_overtakes_no_message_of_its_key(rabbitmq_url):
    """Also not where the messages before it are more than one pass sends of a key."""
    with transaction.atomic():
        refused = publish_many([Draft(BAD, {}) for _ in range(40)])
    with relaying(rabbitmq_url, **AFTER_A_REFUSAL):
        wait_until(lambda: in_state(BAD, State.PAUSED))
    with transaction.atomic():
        for message in refused:
            cancel(message.id)
    wait_until(lambda: PausedTopic.objects.filter(probe_at__lte=DatabaseTime()).exists())

    with Queue(rabbitmq_url, "#") as everything:
        with transaction.atomic():
            messages = publish_many([Draft(GOOD, {}, key="k") for _ in range(300)] + [Draft(BAD, {}, key="k")])
        with relaying(rabbitmq_url, **AFTER_A_REFUSAL):
            arrived = everything.take(301)

    assert ids(arrived).index(str(messages[-1].id)) == 300
    assert ids(arrived) == ids(messages)


@pytest.mark.every_database
def test_messages_of_topics_without_a_refusal_are_sent_once():
    with FakeAmqpPeer() as peer:
        with transaction.atomic():
            publish_many([Draft(f"topic.{n % 7}", {}) for n in range(100)])

        assert drained(peer.url).published == 100

        assert len(peer.published) == len(set(ids(peer.published))) == 100
