"""A relay is killed at any step of pausing, probing, resuming and limiting a topic: the next one continues from the rows.

Each test asserts that the process was really killed there.
"""

from functools import partial

import pytest

from outbox.models import OutboxMessage, PausedTopic
from tests.support.crash.world import OPEN

OPERATIONS = 60
"""More than the refusals that pause a topic."""
PAUSING = "outbox.store.paused_topics"

WHILE_REFUSED = {
    "refused, pause not stored": f"before {PAUSING}.pause_refused",
    "pause stored": f"after {PAUSING}.pause_refused",
    "messages paused, not committed": "after outbox.store.settling.pause_in_hand 3",
    "probe chosen, not committed": f"after {PAUSING}._oldest_paused",
    "probe made ready": f"after {PAUSING}.begin_trial",
    "probe refused, not stored": f"before {PAUSING}.prolong",
    "pause prolonged": f"after {PAUSING}.prolong",
}

WHEN_ACCEPTED = {
    "probe accepted, not stored": f"before {PAUSING}.begin_resuming",
    "resuming": f"after {PAUSING}.begin_resuming",
    "batch chosen, not committed": f"after {PAUSING}._oldest_paused once {PAUSING}.begin_resuming",
    "first batch made ready": f"after {PAUSING}.resume_some",
    "in the middle of the batches": f"after {PAUSING}.resume_some 2",
    "nothing left, not deleted": f"before {PAUSING}.PausedTopic.delete",
    "deleted, not committed": f"after {PAUSING}.PausedTopic.delete",
}

WHILE_LIMITED = {
    "rate begun": f"after {PAUSING}.limit",
    "messages paused, not committed": "after outbox.store.settling.pause_in_hand",
    "messages allowed, not committed": f"after {PAUSING}._oldest_paused",
    "messages made ready": f"after {PAUSING}.release_allowed 2",
    "nothing left, not deleted": f"before {PAUSING}.PausedTopic.delete",
    "deleted, not committed": f"after {PAUSING}.PausedTopic.delete",
}


def refused(world):
    """Messages that have no queue, and a relay."""
    world.operate_together(OPERATIONS)
    return world.relay


def assert_all_arrive(world):
    world.wait_until(lambda: not OutboxMessage.objects.filter(state__in=OPEN).exists(), "everything is published")
    world.wait_until(lambda: not PausedTopic.objects.exists(), "no topic is paused")
    world.assert_nothing_went_wrong(world.drain())
    assert world.published() == OPERATIONS


@pytest.mark.parametrize("name", WHILE_REFUSED)
def test_relay_killed_while_its_topic_is_refused_leaves_a_topic_that_the_next_one_resumes(world, name):
    world.dies_at(WHILE_REFUSED[name], refused(world))

    world.relay()
    world.wait_until(lambda: PausedTopic.objects.filter(pause_seconds__gt=1).exists(), "the next relay tries its messages")
    world.listening()

    assert_all_arrive(world)


@pytest.mark.parametrize("name", WHEN_ACCEPTED)
def test_relay_killed_while_it_resumes_a_topic_strands_no_message(world, name):
    first = refused(world)()
    world.wait_until(lambda: OutboxMessage.objects.filter(state="paused").count() > OPERATIONS / 2, "most messages are paused")
    first.kill()
    world.listening()

    world.dies_at(WHEN_ACCEPTED[name], world.relay)
    world.relay()

    assert_all_arrive(world)


@pytest.mark.parametrize("name", WHILE_LIMITED)
def test_relay_killed_while_a_rate_limits_its_topic_strands_no_message(world, name):
    limited = partial(world.relay, outbox={"TOPICS": {"*": {"RATE": "50/s"}}})
    world.listening()
    world.operate_together(OPERATIONS)

    world.dies_at(WHILE_LIMITED[name], limited)
    limited()

    assert_all_arrive(world)
