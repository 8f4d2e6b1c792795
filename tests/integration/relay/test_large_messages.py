"""Large messages: the memory of a relay does not grow with their number, and none is too large for a pass."""

import random
from datetime import timedelta

import pytest
from django.core.management import call_command
from django.db import transaction
from django.test import override_settings

from exactly_once.sql.now import DatabaseTime
from outbox import Draft, publish_many
from outbox.models import OutboxMessage
from outbox.states import State
from tests.support.relaying import EXCHANGE, TOPIC, Queue, connected, drained, ids, one_pass

pytestmark = pytest.mark.django_db(transaction=True)

MESSAGES = 150
A_MEGABYTE = 1_000_000
HOUR = timedelta(hours=1)
GIVEN = [400, 500, 5000, 100, 200, 300, 400]


def count(state):
    return OutboxMessage.objects.filter(state=state).count()


def of_sizes(*sizes, **options):
    with transaction.atomic():
        return publish_many([Draft(TOPIC, "x" * size, **options) for size in sizes])


def sizes(messages):
    return [len(message.body) - 2 for message in messages]


def test_relay_of_a_backlog_of_large_messages_needs_little_memory(command, rabbitmq_url):
    for _ in range(MESSAGES // 10):
        of_sizes(*[A_MEGABYTE] * 10)
    outbox = {"BROKER_URL": rabbitmq_url, "EXCHANGE": EXCHANGE}
    with Queue(rabbitmq_url, **{"x-max-length": 1}), command("outbox_relay", OUTBOX=outbox) as relay:
        relay.until(lambda: count(State.PUBLISHED) == MESSAGES)
        assert relay.peak_megabytes() < 180


@pytest.mark.every_database
def test_pass_sends_no_more_than_its_limit_of_bytes_and_a_larger_message_alone(peer, monkeypatch):
    monkeypatch.setattr("outbox.store.messages.BATCH_BYTES", 1000)
    of_sizes(*GIVEN, key="k")
    passes = []
    with connected(peer.url) as transport:
        while one_pass(transport).claimed:
            passes.append(sizes(peer.published))
            peer.published.clear()

    assert passes == [[400, 500], [5000], [100, 200, 300], [400]]


@pytest.mark.parametrize("seed", range(4))
def test_messages_of_any_sizes_arrive_whole_and_in_the_order_of_their_keys(peer, seed, monkeypatch):
    """Also those that were delayed, and beside messages with a priority."""
    chance = random.Random(seed)
    drafts = []
    for _ in range(80):
        key = chance.choice(["", "a", "b", "c"])
        delay = chance.choice([None, None, HOUR])
        priority = 0 if key else chance.choice([0, 0, 5])
        body = "x" * chance.choice([1, 50, 300, 2000, 20_000])
        drafts.append(Draft(TOPIC, body, key=key, delay=delay, priority=priority))
    with transaction.atomic():
        messages = publish_many(drafts)
    OutboxMessage.objects.filter(state=State.SCHEDULED).update(state=State.READY, available_at=DatabaseTime())

    monkeypatch.setattr("outbox.store.messages.BATCH_BYTES", chance.choice([10, 1000, 30_000]))
    drained(peer.url, BATCH_SIZE=chance.choice([1, 5, 500]))

    sent = dict(zip(ids(peer.published), peer.published, strict=True))
    for key in ("a", "b", "c"):
        assert [name for name in sent if name in ids(of := in_key(messages, drafts, key))] == ids(of)
    assert [sizes([sent[name]])[0] for name in ids(messages)] == [len(draft.payload) for draft in drafts]


def in_key(messages, drafts, key):
    return [message for message, draft in zip(messages, drafts, strict=True) if draft.key == key]


@pytest.mark.long
def test_local_handlers_get_large_messages_whole_and_a_new_one_gets_its_past(handles, monkeypatch):
    monkeypatch.setattr("outbox.store.messages.BATCH_BYTES", 1000)
    first, new = [], []
    handles(lambda message: first.append(len(message.payload)), topic=TOPIC, name="first", ordered=True)
    with override_settings(OUTBOX={"BROKER_URL": "local://"}):
        of_sizes(*GIVEN, key="k")
        call_command("outbox_relay", drain=True)
        handles(lambda message: new.append(len(message.payload)), topic=TOPIC, name="new", ordered=True, start_from="beginning")
        call_command("outbox_relay", drain=True)

    assert first == new == GIVEN


def test_replay_sends_large_messages_whole_and_in_the_order_of_their_key(peer, monkeypatch):
    monkeypatch.setattr("outbox.store.messages.BATCH_BYTES", 1000)
    with override_settings(OUTBOX={"BROKER_URL": peer.url}):
        of_sizes(*GIVEN, key="k")
        call_command("outbox_relay", drain=True)
        call_command("outbox_replay", all=True, yes=True, verbosity=0)

    assert sizes(peer.published) == GIVEN + GIVEN
