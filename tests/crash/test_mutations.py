"""Proof that the crash tests can fail: the oracle finds each seeded bug, and nothing in the same workload without it.

A workload takes the bug of the process it is about, "" for none.
"""

import logging
from contextlib import suppress

import pytest
from django.db import transaction

from outbox import publish
from outbox.models import OutboxMessage
from tests.support.apps.effects.models import Unique
from tests.support.crash.operations import Changed
from tests.support.crash.points import EFFECT, FINISH, SEND, SETTLE
from tests.support.servers import FaultProxy

logger = logging.getLogger(__name__)


OPERATIONS = 10


def a_consumer_is_killed_in_its_handler(world, bug):
    world.listening()
    world.end(world.workers[-1])
    world.relay()
    world.operate(OPERATIONS)
    world.dies_at(f"after {EFFECT} 3", world.consumer, bug=bug)


def a_handler_swallows_a_database_error(world, bug):
    world.relay()
    consumer = world.consumer(bug=bug)
    world.operate(OPERATIONS, how="swallow first")
    world.wait_until(lambda: world.runs().total() >= OPERATIONS and world.is_quiet(), "every message was handled")
    world.end(consumer)


def the_broker_connection_dies_with_a_batch_on_its_way(world, bug):
    world.listening()
    with FaultProxy("127.0.0.1", world.rabbit.port) as proxy:
        # The bug needs no confirm, and must be given the time to show.
        outbox = {"BATCH_DEADLINE": 30 if bug else 1}
        relay = world.relay(bug=bug, broker_url=proxy.through(world.broker_url), outbox=outbox)
        world.wait_until(lambda: proxy.connections >= 2, "both lanes are connected")
        world.operate(1)
        world.wait_until(world.is_quiet, "the connection is in use")
        proxy.freeze()
        settled = world.published() + OPERATIONS
        world.operate(OPERATIONS)
        tried = (lambda: world.published() == settled) if bug else (lambda: relay.has_said("is unavailable"))
        world.wait_until(tried, "the relay has tried")
        proxy.cut()
        proxy.thaw()
        relay.kill()


def no_queue_is_there_yet(world, bug):
    world.delete_queues()
    relay = world.relay(bug=bug)
    world.operate(OPERATIONS)
    untried = OutboxMessage.objects.filter(attempts=0)
    world.wait_until(lambda: not untried.exists(), "the relay has tried and settled")
    world.end(relay)


def a_relay_is_killed_between_confirm_and_settlement(world, bug):
    world.listening(bug=bug)
    world.operate(OPERATIONS)
    world.dies_at(f"before {SETTLE} once {SEND}", world.relay)


def a_consumer_is_killed_before_its_commit(world, bug):
    world.relay()
    world.operate(OPERATIONS)
    world.dies_at(f"before {FINISH} 3", world.consumer, bug=bug)


MUTATIONS = {
    "acknowledges_before_the_commit": (a_consumer_is_killed_in_its_handler, "lost"),
    "has_no_sentinel": (a_handler_swallows_a_database_error, "lost"),
    "settles_before_the_confirm": (the_broker_connection_dies_with_a_batch_on_its_way, "lost"),
    "ignores_returned_messages": (no_queue_is_there_yet, "lost"),
    "runs_duplicates": (a_relay_is_killed_between_confirm_and_settlement, "doubled"),
    "writes_the_effect_outside_the_transaction": (a_consumer_is_killed_before_its_commit, "doubled"),
}


@pytest.mark.parametrize("bug", MUTATIONS)
def test_the_oracle_finds_a_seeded_bug_and_nothing_without_it(world, bug):
    workload, harm = MUTATIONS[bug]

    workload(world, "")
    world.assert_nothing_went_wrong(world.drain())
    workload(world, bug)
    found = world.drain()

    assert getattr(found, harm), f"{bug} went unnoticed: {found}"
    logger.info("%s: %s", bug, found)


def test_the_oracle_finds_a_message_of_a_change_that_was_rolled_back(world):
    """The dual write itself: the message is committed before the change, and then the change is not."""
    with transaction.atomic():
        publish("crash.done", {"operation": "never", "how": ""})
    with suppress(Changed), transaction.atomic():
        Unique.objects.create(name="never")
        raise Changed

    assert world.drain().ghosts == {"never"}


def test_a_failpoint_that_names_no_function_ends_the_process_with_an_error(world):
    worker = world.relay(failpoint="kill before outbox.store.no_such_function")

    assert worker.ends() > 0
    assert worker.has_said("no_such_function")
