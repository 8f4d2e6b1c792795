"""A process is killed at a named point; the next one loses no message, doubles no effect and invents none.

Each test asserts that the process was really killed there.
"""

from collections import Counter
from datetime import timedelta

import pytest
from django.db import transaction
from django.db.models import F

from exactly_once.models import Lease
from exactly_once.sql.days import day_of
from exactly_once.sql.now import DatabaseTime
from outbox import Draft, publish, publish_many
from outbox.models import OutboxMessage, PendingCallback, TrailEntry
from outbox.states import State
from outbox.store import history
from tests.support.apps.effects.models import Effect
from tests.support.crash import points
from tests.support.crash import witness as load
from tests.support.crash.witness import everything_is_published

DAYS = history.HISTORY.days
UNHURRIED = {"BATCH_DEADLINE": 60, "WATCHDOG": 300}
"""Long enough that no message is sent again because of a deadline, also on a slow machine."""

OPERATIONS = 12

PADDING = 20_000
"""A body so large that a batch needs several writes."""

NONE, SOME, ALL = range(1), range(1, OPERATIONS + 1), range(OPERATIONS, OPERATIONS + 1)
"""The number of messages of the batch that may be delivered twice."""

RELAY_POINTS = {
    "claimed, nothing sent": (f"before {points.SEND}", NONE),
    "in the middle of a batch": (f"after {points.WRITE} 2", SOME),
    "everything sent, no confirm awaited": (f"before {points.AWAIT}", SOME),
    "confirmed, not settled": (f"before {points.SETTLE} once {points.SEND}", ALL),
    "moved to history, callbacks not stored": (f"before {points.RECORD_CALLS} once {points.SEND}", ALL),
    "settled, not committed": (f"after {points.SETTLE} once {points.SEND}", ALL),
    "committed": (f"after {points.PASS} once {points.SEND}", NONE),
}


@pytest.mark.parametrize("name", RELAY_POINTS)
def test_a_relay_killed_at_any_point_loses_nothing_and_doubles_no_effect(world, name):
    point, twice = RELAY_POINTS[name]
    world.listening()
    world.operate_together(OPERATIONS, padding=PADDING)

    world.dies_at(point, world.relay, outbox=UNHURRIED)
    settled = world.published()
    world.relay(outbox=UNHURRIED)
    found = world.drain()

    assert settled == (OPERATIONS if name == "committed" else 0)
    world.assert_nothing_went_wrong(found)
    assert world.redelivered() in twice
    assert world.suppressed() == world.redelivered()


@pytest.mark.parametrize(
    "point", [f"{when} {step} 2" for step in (points.MAKE_DAY, points.DROP_DAY) for when in ("before", "after")]
)
def test_a_relay_killed_in_its_housekeeping_is_followed_by_another(world, point):
    today = day_of("default")
    for day in DAYS.existing("default"):
        history.HISTORY.drop_day("default", day)  # an earlier test's
    for day in (today - 20, today - 19, today - 18):
        DAYS.make("default", day)

    world.dies_at(point, world.relay)
    Lease.objects.all().delete()  # as if it had run out
    world.relay()
    world.listening()
    world.operate(OPERATIONS)

    ahead = range(today + 1, today + 4)
    world.wait_until(lambda: set(ahead) <= set(DAYS.existing("default")), "the days ahead have their partitions")
    world.wait_until(lambda: min(DAYS.existing("default")) >= today, "the old days are dropped")
    world.assert_nothing_went_wrong(world.drain())


CONSUMER_POINTS = {
    "inbox row inserted": f"after {points.BEGIN_FRESH} 3",
    "in the handler, effect written": f"after {points.EFFECT} 3",
    "handler returned, before the sentinel": f"before {points.FINISH} 3",
    "after the sentinel, before the commit": f"after {points.FINISH} 3",
    "committed, not acknowledged": f"before {points.ACK} 1",
    "acknowledged": f"after {points.ACK} 1",
}


@pytest.mark.parametrize("name", CONSUMER_POINTS)
def test_a_consumer_killed_at_any_point_loses_nothing_and_doubles_no_effect(world, name):
    world.relay()
    world.operate(OPERATIONS, how="chain", prefix="chain-")

    world.dies_at(CONSUMER_POINTS[name], world.consumer)
    found = world.drain()

    world.assert_nothing_went_wrong(found)
    if name != "acknowledged":  # it may have had no other unacknowledged delivery
        assert world.redelivered() >= 1
    if "committed, not" in name:
        assert world.suppressed() >= 1


@pytest.mark.parametrize("point", [f"before {points.STORE_FAILED}", f"after {points.STORE_FAILED}", f"before {points.ACK}"])
def test_a_consumer_killed_while_it_stores_a_failure_loses_nothing(world, point):
    world.relay()
    world.operate(3, how="fail first")

    world.dies_at(point, world.consumer)
    found = world.drain()

    world.assert_nothing_went_wrong(found)
    assert_the_handler_failed_first(world)


def assert_the_handler_failed_first(world):
    """And its first attempt left no effect. An attempt that its thread began too late is counted and not run, so not all need
    have failed."""
    assert max(world.runs().values()) >= 2
    attempts = {detail.rpartition(":")[2] for detail in Effect.objects.values_list("detail", flat=True)}
    assert attempts
    assert "1" not in attempts


def test_a_consumer_killed_at_every_step_of_the_careful_path_loses_nothing(world):
    """One message, six kills; it is a redelivery since the first. The handler fails by itself in the first attempt only."""
    world.relay()
    world.operate(1, how="fail first")
    steps = [
        f"before {points.STORE_FAILED}",
        f"after {points.ADMIT}",
        f"before {points.BEGIN_STORED}",
        f"after {points.BEGIN_STORED}",
        f"after {points.EFFECT}",
        f"after {points.FINISH}",
    ]

    for step in steps:
        world.dies_at(step, world.consumer)
    found = world.drain()

    world.assert_nothing_went_wrong(found)
    assert max(world.runs().values()) >= 3


LOCAL_POINTS = {
    "claimed, nothing handed over": f"before {points.HAND_OVER}",
    "in the middle of handing over": f"after {points.ADMIT}",
    "handed over, not settled": f"before {points.SETTLE}",
    "settled, not committed": f"after {points.SETTLE}",
    "handed over and committed": f"after {points.PASS}",
    "stored message claimed": f"before {points.BEGIN_STORED}",
    "stored message begun": f"after {points.BEGIN_STORED} 2",
    "in the handler, effect written": f"after {points.EFFECT} 2",
    "handler returned, before the sentinel": f"before {points.FINISH} 2",
    "after the sentinel, before the commit": f"after {points.FINISH} 2",
}


@pytest.mark.every_database
@pytest.mark.parametrize("name", LOCAL_POINTS)
def test_a_process_without_a_broker_killed_at_any_point_loses_nothing(local_world, name):
    local_world.operate(5, how="chain", prefix="chain-")

    local_world.dies_at(LOCAL_POINTS[name], local_world.relay)
    found = local_world.drain()

    local_world.assert_nothing_went_wrong(found)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_killed_when_a_stored_message_begins_with_the_commit_of_another_loses_nothing(local_world, when):
    local_world.operate(30)

    local_world.dies_at(f"{when} {points.OPEN_NEXT} 2", local_world.relay)

    local_world.assert_nothing_went_wrong(local_world.drain())


@pytest.mark.every_database
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_without_a_broker_killed_at_any_of_its_commits_loses_nothing(local_world, when):
    """The n-th process is killed at its n-th commit."""
    for nth in range(1, 7):
        local_world.operate(nth + 1, how="fail first" if nth % 3 == 0 else "")
        local_world.dies_at(f"{when} {points.COMMIT} {nth}", local_world.relay)

    local_world.assert_nothing_went_wrong(local_world.drain())


CALLBACK_POINTS = {
    "settled and claimed": "before outbox.store.pending_callbacks.begin_call",
    "in the callback, its effect written": "after tests.support.apps.effects.models.Effect.save",
    "returned, not committed": "after outbox.store.pending_callbacks.finish_call",
}
ONE_THREAD = {"CONCURRENCY": 1}
"""So that no other call commits in the moment in which one dies."""


@pytest.mark.every_database
def test_every_callback_takes_effect_once_although_processes_are_killed_at_each_of_its_steps(local_world):
    with transaction.atomic():
        messages = [publish("crash.told", {}) for _ in range(3)]

    for point in CALLBACK_POINTS.values():
        local_world.dies_at(point, local_world.relay, outbox=ONE_THREAD)
        assert local_world.published() == len(messages)
        assert not Effect.objects.exists()
        assert PendingCallback.objects.count() == len(messages)
        PendingCallback.objects.update(available_at=DatabaseTime())  # as if the leases had run out
    local_world.relay()
    local_world.wait_until(lambda: not PendingCallback.objects.exists(), "every callback was called")
    local_world.end(local_world.workers[-1])

    assert sorted(Effect.objects.values_list("name", flat=True)) == sorted(str(message.id) for message in messages)
    assert sum(local_world.runs().values()) == len(messages) + 2, (
        "two processes were killed after the call and before its commit"
    )


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
        Lease.objects.all().delete()  # as if it had run out
    schedule()
    survivors = [world.relay(outbox=EVERYTHING) for _ in range(2)]
    world.wait_until(everything_is_published, "another has taken over the wheel")
    for survivor in survivors:
        world.end(survivor)

    assert_each_became_ready_once_and_none_early()
    witness.assert_nothing_went_wrong()
