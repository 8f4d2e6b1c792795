"""Random kills under load: what remains true at the end, whatever happened on the way."""

from __future__ import annotations

import logging

import pytest

from tests.support.crash.nemesis import Nemesis
from tests.support.crash.world import CONSUMER, RELAY

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.proof

SOAK_SECONDS = 12
LOCAL_SOAK_SECONDS = 8


def test_two_relays_and_two_consumers_are_killed_at_random(world, record_property):
    fleet = [world.relay(), world.relay(), world.consumer(), world.consumer()]
    nemesis = Nemesis(world, fleet)

    with world.load(producers=3) as tally, nemesis.at_work():
        nemesis.last(SOAK_SECONDS)
        world.wait_until(
            lambda: min(nemesis.kills[RELAY], nemesis.kills[CONSUMER]) >= 5 and world.redelivered() > 0 and world.suppressed(),
            "the nemesis did its work",
        )
    found = world.drain()

    figures = {
        "seed": world.seed,
        "kills": dict(nemesis.kills),
        "operations": dict(tally),
        "outbox": dict(world.outbox()),
        "redelivered": world.redelivered(),
        "suppressed": world.suppressed(),
        "verdict": str(found),
    }
    logger.info("%s", figures)
    record_property("figures", figures)
    assert not nemesis.own_ends, nemesis.own_ends
    assert tally["rollback"] > 0
    assert tally["savepoint"] > 0
    world.assert_nothing_went_wrong(found)


@pytest.mark.every_database
def test_processes_without_broker_are_killed_at_random(local_world, record_property):
    fleet = [local_world.relay(), local_world.consumer()]
    nemesis = Nemesis(local_world, fleet)

    with local_world.load(producers=2) as tally, nemesis.at_work():
        nemesis.last(LOCAL_SOAK_SECONDS)
        local_world.wait_until(lambda: nemesis.kills.total() >= 3, "the nemesis did its work")
    found = local_world.drain()

    figures = {
        "seed": local_world.seed,
        "kills": dict(nemesis.kills),
        "operations": dict(tally),
        "verdict": str(found),
    }
    logger.info("%s", figures)
    record_property("figures", figures)
    assert not nemesis.own_ends, nemesis.own_ends
    local_world.assert_nothing_went_wrong(found)


def test_every_message_is_accounted_for_at_every_moment(world):
    """Published, waiting, dead, cancelled and expired ones are all that were ever committed: in one snapshot, mid-load."""
    fleet = [world.relay(), world.consumer()]
    nemesis = Nemesis(world, fleet)

    with world.load(producers=2), nemesis.at_work():
        for _ in range(10):
            world.wait_until(lambda: nemesis.kills.total() > 0, "somebody was killed")
            before = world.published()
            world.wait_until(lambda before=before: world.published() > before, "more was published")
            states, due = world.snapshot()
            assert sum(states.values()) == due
    world.assert_nothing_went_wrong(world.drain())
