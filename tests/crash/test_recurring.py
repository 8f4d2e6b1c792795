"""Recurring messages while relays are killed, and with several relays: each tick is published once."""

from datetime import datetime, timedelta

import pytest

from exactly_once.sql.now import DatabaseTime
from outbox.contrib.recurring.models import Schedule
from outbox.models import OutboxMessage
from tests.support.apps.effects.models import Effect
from tests.support.apps.scheduled import EVERY, NAME
from tests.support.crash.nemesis import Nemesis
from tests.support.crash.points import COMMIT, TICK

SETTINGS = "tests.support.apps.scheduled.settings"
MISSED = 5
KILLS = 6
POINTS = {
    "before the first call": f"before {TICK}",
    "between two calls": f"after {TICK} 3",
    "before the commit": f"before {COMMIT} once {TICK}",
    "after the commit": f"after {COMMIT} once {TICK}",
}


def missed(ticks):
    """As if no relay had run for as long."""
    ago = DatabaseTime(-ticks * EVERY)
    Schedule.objects.create(name=NAME, recurrence=f"every {EVERY}", position=ago, due_at=ago)


def assert_published_once(ticks):
    messages = list(OutboxMessage.objects.values_list("biz_id", flat=True))
    assert len(messages) == len({*messages}) == ticks
    assert sorted(Effect.objects.values_list("name", flat=True)) == sorted(messages)


@pytest.mark.every_database
@pytest.mark.parametrize("name", POINTS)
def test_ticks_are_published_once_by_the_relay_after_the_one_that_was_killed(local_world, name):
    missed(MISSED)
    local_world.dies_at(POINTS[name], local_world.relay)
    local_world.relay()
    local_world.wait_until(lambda: Effect.objects.count() >= MISSED and local_world.is_quiet(), "the ticks are handled")

    assert_published_once(MISSED)
    assert Schedule.objects.get().position < Schedule.objects.get().due_at


def test_each_second_is_published_once_while_relays_are_killed(world):
    world.listening()
    kill_relays_of_a_schedule_of_each_second(world)


@pytest.mark.every_database
@pytest.mark.only_sqlite
def test_each_second_is_published_once_on_sqlite_while_relays_are_killed(local_world):
    kill_relays_of_a_schedule_of_each_second(local_world)


def kill_relays_of_a_schedule_of_each_second(world):
    world.environment["EVERY_SECONDS"] = "1"
    nemesis = Nemesis(world, [world.relay() for _ in range(3)])
    with nemesis.at_work():
        world.wait_until(lambda: nemesis.kills.total() >= KILLS and Effect.objects.count() >= KILLS, "relays were killed")
    relays = [worker for worker in world.workers if worker.command == ["outbox_relay"] and worker.is_alive]
    world.wait_until(lambda: all(relay.is_ready for relay in relays), "the last ones run")
    world.end(*relays[1:])
    world.end(relays[0])
    Schedule.objects.update(paused_at=DatabaseTime())
    world.relay()
    world.wait_until(world.is_quiet, "everything was handled")

    assert not nemesis.own_ends, nemesis.own_ends
    instants = sorted(datetime.fromisoformat(name.partition("@")[2]) for name in Effect.objects.values_list("name", flat=True))
    first, last = instants[0], Schedule.objects.get().position
    assert instants == [first + timedelta(seconds=n) for n in range((last - first).seconds + 1)]
    assert OutboxMessage.objects.count() == len(instants) >= KILLS
