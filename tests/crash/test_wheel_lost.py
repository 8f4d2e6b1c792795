"""The timing wheel is lost with its process: scheduled messages are still published, once and never early."""

from collections import Counter
from datetime import timedelta

from django.db import transaction
from django.db.models import F

from outbox import Draft, publish_many
from outbox.models import OutboxMessage, TrailEntry
from outbox.states import State
from tests.support.crash import witness as load
from tests.support.crash.witness import everything_is_published

EVERYTHING = {"TRAIL": "all"}
KILLS = (
    "after outbox.store.scheduling.upcoming 1",
    "before outbox.store.scheduling.fire 1",
    "after outbox.store.scheduling.fire 1",
    "after outbox.store.scheduling.upcoming 3",
)
NUMBER = 60


def schedule(number=NUMBER, within=timedelta(seconds=3)):
    with transaction.atomic():
        publish_many(Draft(load.TOPIC, {}, delay=within * n / number) for n in range(1, number + 1))


def assert_each_became_ready_once_and_none_early():
    due = dict(OutboxMessage.objects.values_list("message_id", "available_at"))
    fired = list(TrailEntry.objects.filter(was=State.SCHEDULED, became=State.READY).values_list("message_id", "at"))
    assert Counter(message_id for message_id, _ in fired) == Counter(due.keys())
    assert [message_id for message_id, at in fired if at < due[message_id]] == []
    assert not OutboxMessage.objects.filter(settled_at__lt=F("deliver_at")).exists()


def test_scheduled_messages_become_ready_once_and_not_early_although_relays_are_killed(world, witness):
    for point in KILLS:
        schedule()
        world.dies_at(point, world.relay, outbox=EVERYTHING)
    schedule()
    survivors = [world.relay(outbox=EVERYTHING) for _ in range(2)]
    world.wait_until(everything_is_published, "another has taken over the wheel")
    for survivor in survivors:
        world.end(survivor)

    assert_each_became_ready_once_and_none_early()
    witness.assert_nothing_went_wrong()


def test_scheduled_messages_become_ready_once_and_not_early_although_a_relay_freezes(world, witness):
    schedule()
    frozen = world.relay(failpoint="stop before outbox.store.scheduling.fire 1", outbox=EVERYTHING)
    world.wait_until(lambda: frozen.is_stopped, "the relay is frozen before it makes messages ready")
    schedule()
    other = world.relay(outbox=EVERYTHING)
    world.wait_until(everything_is_published, "the other has taken over the wheel")
    frozen.wake()
    schedule()
    world.wait_until(everything_is_published, "they go on together")
    world.end(other)
    world.end(frozen)

    assert_each_became_ready_once_and_none_early()
    witness.assert_nothing_went_wrong()
