"""Random kills under load: the guarantees that hold at the end."""

import logging
from datetime import timedelta

import pytest

from tests.support.crash.nemesis import Nemesis
from tests.support.crash.operations import EVERY_KIND, EVERY_OUTCOME, TIMED
from tests.support.crash.oracle import punctual
from tests.support.crash.world import CONSUMER, RELAY

logger = logging.getLogger(__name__)


SOAK_SECONDS = 12
LOCAL_SOAK_SECONDS = 8
ASK_SOON = {"CHECKS": {"EVERY": 0.5}}
"""After this time another relay repeats the check of a relay that was killed while it asked a checker."""
SOON_AFTER = timedelta(seconds=0.3)
"""While processes are killed, most delayed messages are late by more than any of them could be early."""


@pytest.fixture(autouse=True)
def _checked_soon(settings):
    """A prepared message that its producer forgets is checked after a second; that time is fixed when it is prepared."""
    settings.OUTBOX = {"CHECKS": {"AFTER": timedelta(seconds=1)}}


def test_random_kills_of_relays_and_consumers_lose_and_double_no_message(world):
    """Every message ends as the business decided: delayed, prioritised, cancelled, rescheduled, expired and prepared ones."""
    fleet = [world.relay(outbox=ASK_SOON), world.relay(outbox=ASK_SOON), world.consumer(), world.consumer()]

    def enough(kills):
        return min(kills[RELAY], kills[CONSUMER]) >= 5 and world.redelivered() and world.suppressed()

    assert_random_kills_lose_and_double_nothing(world, fleet, 3, SOAK_SECONDS, enough)


@pytest.mark.every_database
def test_random_kills_without_a_broker_lose_and_double_no_message(local_world):
    fleet = [local_world.relay(outbox=ASK_SOON), local_world.consumer()]

    assert_random_kills_lose_and_double_nothing(local_world, fleet, 2, LOCAL_SOAK_SECONDS, lambda kills: kills.total() >= 3)


def assert_random_kills_lose_and_double_nothing(world, fleet, producers, seconds, enough):
    """Kill processes of the fleet for so many seconds and until `enough(kills)`."""
    nemesis = Nemesis(world, fleet)
    with world.load(producers=producers, kinds=EVERY_KIND) as tally:
        with nemesis.at_work():
            nemesis.last(seconds)
            world.wait_until(lambda: enough(nemesis.kills), "the nemesis did its work")
        wait_for_every_outcome(world, tally)
        world.wait_until(lambda: punctual(SOON_AFTER) >= 3, "delayed messages are on time again")
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
    assert not nemesis.own_ends, nemesis.own_ends
    assert not EVERY_OUTCOME - tally.keys()
    world.assert_nothing_went_wrong(found)
    assert_every_ending_occurred(world)


def wait_for_every_outcome(world, tally):
    """Most effects occur during the kills. A delayed message may need a relay that runs for longer than the timer's lease."""
    try:
        world.wait_until(lambda: tally.keys() >= EVERY_OUTCOME, "every outcome has occurred")
    except AssertionError as error:
        error.add_note(f"{sorted(EVERY_OUTCOME - tally.keys())} never occurred, {dict(tally)} did")
        raise


def assert_every_ending_occurred(world):
    """Some were cancelled, as the outcomes say. Each of these may have been restored since."""
    assert {*world.outbox(), "cancelled"} == {"published", "cancelled", "rolled_back", "expired"}


def test_every_message_is_accounted_for_at_every_moment(world):
    """In one snapshot under load, published, waiting, dead, cancelled and expired messages are all that were ever committed."""
    nemesis = Nemesis(world, [world.relay(), world.consumer()])

    with world.load(producers=2, kinds=TIMED), nemesis.at_work():
        for _ in range(10):
            world.wait_until(lambda: nemesis.kills.total() > 0, "a process was killed")
            before = world.published()
            world.wait_until(lambda before=before: world.published() > before, "more was published")
            states, due = world.snapshot()
            assert sum(states.values()) == due
    world.assert_nothing_went_wrong(world.drain())
