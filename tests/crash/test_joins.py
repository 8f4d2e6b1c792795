"""Joins while processes are killed: each run has its effect exactly once. JOIN_RUNS=10000 makes the long test longer."""

import logging
import os
import random
from datetime import timedelta

import pytest
from django.db import transaction
from django.db.models import F

from exactly_once.telemetry.tracing import Cause, caused_by
from inbox.contrib.joins.models import Part, Run
from inbox.contrib.joins.store import TOPIC
from inbox.models import InboxMessage
from inbox.states import DUE
from inbox.testing import travel
from outbox import publish, request
from tests.support.apps.effects.models import Effect
from tests.support.apps.joined import ANSWERED, ASKED, TOPICS
from tests.support.crash.nemesis import Nemesis
from tests.support.crash.points import ADD_PART, COMMIT, EFFECT, GATHER, MAKE_DUE, OPEN_RUN

RUNS = int(os.environ.get("JOIN_RUNS", "400"))
COPIES = 0.1
LONGEST_SECONDS = 300

POINTS = {
    "before the run is opened": f"before {OPEN_RUN}",
    "after its row is inserted": f"after {OPEN_RUN}",
    "after a part is stored": f"after {ADD_PART} 2",
    "before the row of the run is due": f"before {MAKE_DUE}",
    "after the row of the run is due": f"after {MAKE_DUE}",
    "after the commit of the last part": f"after {COMMIT} once {MAKE_DUE}",
    "before the messages are gathered": f"before {GATHER}",
    "after the effect": f"after {EFFECT}",
    "before the commit of the join": f"before {COMMIT} once {GATHER}",
    "after the commit of the join": f"after {COMMIT} once {GATHER}",
}

logger = logging.getLogger(__name__)

SETTINGS = "tests.support.apps.joined.settings"


def publish_run(run_id, topics=TOPICS):
    with transaction.atomic():
        for topic in topics:
            publish(topic, {"run_id": run_id}, biz_id=f"{topic}-{run_id}")


def ended():
    return set(InboxMessage.objects.filter(topic=TOPIC).values_list("state", flat=True))


def assert_started_once(run_id="monday"):
    assert list(Effect.objects.values_list("name", "detail")) == [(run_id, ",".join(TOPICS))]
    assert set(Part.objects.values_list("topic", flat=True)) == {*TOPICS}


@pytest.mark.every_database
@pytest.mark.parametrize("name", POINTS)
def test_a_process_killed_at_any_step_of_a_join_starts_the_run_once(local_world, name):
    publish_run("monday")
    local_world.dies_at(POINTS[name], local_world.relay)
    local_world.relay()
    local_world.wait_until(lambda: ended() == {"done"} and local_world.is_quiet(), "the run is done")

    assert_started_once()


@pytest.mark.every_database
def test_a_process_killed_at_the_deadline_leaves_a_dead_letter_that_names_the_missing_messages(local_world):
    publish_run("monday", TOPICS[:1])
    collector = local_world.relay()
    local_world.wait_until(lambda: Part.objects.exists() and collector.is_ready, "the message is collected")
    local_world.end(collector)
    travel(timedelta(hours=2))
    local_world.dies_at(f"before {GATHER}", local_world.relay)
    local_world.relay()
    local_world.wait_until(lambda: ended() == {"dead"}, "the run is a dead letter")

    assert ", ".join(TOPICS[1:]) in InboxMessage.objects.get(topic=TOPIC).last_error
    assert not Effect.objects.exists()


@pytest.mark.timeout(2 * LONGEST_SECONDS)
def test_runs_start_once_each_while_relays_and_consumers_are_killed(world):
    """Three topics in random order, with copies; two relays and three consumers, which are killed until half is done."""
    chance = random.Random(world.seed)
    runs = [f"run-{number}" for number in range(RUNS)]
    load = [(topic, run) for topic in TOPICS for run in runs]
    load += chance.sample(load, int(len(load) * COPIES))
    chance.shuffle(load)
    for start in range(0, len(load), 1000):
        with transaction.atomic():
            for topic, run in load[start : start + 1000]:
                publish(topic, {"run_id": run}, biz_id=run)
    fleet = [world.listening(), *(world.consumer() for _ in range(2)), *(world.relay() for _ in range(2))]
    nemesis = Nemesis(world, fleet)
    with nemesis.at_work():
        world.wait_until(lambda: nemesis.kills.total() > 5 and Effect.objects.count() > RUNS / 2, "half is done")
    world.wait_until(world.is_quiet, "everything was handled", LONGEST_SECONDS)
    logger.info("%d runs; kills: %s.", RUNS, dict(nemesis.kills))

    assert not nemesis.own_ends, nemesis.own_ends
    assert sorted(Effect.objects.values_list("name", flat=True)) == sorted(runs)
    assert set(Effect.objects.values_list("detail", flat=True)) == {",".join(TOPICS)}
    assert ended() == {"done"}
    assert Run.objects.count() == RUNS
    assert Part.objects.count() == RUNS * len(TOPICS)
    assert set(InboxMessage.objects.values_list("state", flat=True)) == {"done"}


ANSWERING = {
    "before the second of request and answer is stored": f"before {ADD_PART} 2",
    "after the commit of the second": f"after {COMMIT} once {MAKE_DUE}",
    "after the effect": f"after {EFFECT}",
    "after the commit of the effect": f"after {COMMIT} once {GATHER}",
}
AT_THE_TIMEOUT = {
    "before the run is read": f"before {GATHER}",
    "after the effect": f"after {EFFECT}",
    "after the commit of the effect": f"after {COMMIT} once {GATHER}",
}


def ask(*, is_answered):
    with transaction.atomic():
        return request(ASKED, {"payment": "payment-1", "is_answered": is_answered})


def effects():
    return list(Effect.objects.values_list("name", "detail"))


@pytest.mark.every_database
@pytest.mark.parametrize("name", ANSWERING)
def test_a_process_killed_at_any_step_handles_the_answer_once(local_world, name):
    ask(is_answered=True)
    local_world.dies_at(ANSWERING[name], local_world.relay)
    local_world.relay()
    local_world.wait_until(lambda: ended() == {"done"} and local_world.is_quiet(), "the answer is handled")

    assert effects() == [("payment-1", "paid")]


@pytest.mark.every_database
@pytest.mark.parametrize("name", AT_THE_TIMEOUT)
def test_a_process_killed_at_the_timeout_handles_it_once_and_a_late_answer_is_a_dead_letter(local_world, name):
    asked = ask(is_answered=False)
    collector = local_world.relay()
    local_world.wait_until(lambda: Part.objects.exists() and collector.is_ready, "the request is collected")
    local_world.end(collector)
    travel(timedelta(hours=1))
    local_world.dies_at(AT_THE_TIMEOUT[name], local_world.relay)
    local_world.relay()
    local_world.wait_until(lambda: ended() == {"done"} and local_world.is_quiet(), "the timeout is handled")
    with transaction.atomic(), caused_by(Cause(correlation_id=str(asked.id))):
        publish(ANSWERED, {"result": "paid"})
    local_world.wait_until(
        lambda: InboxMessage.objects.filter(topic=ANSWERED, state="dead").exists(), "the late answer is visible"
    )

    assert effects() == [("payment-1", "no answer")]


@pytest.mark.parametrize("message", [1, 2], ids=["the request", "the answer"])
def test_a_message_that_a_killed_process_had_claimed_is_not_missing_at_the_timeout(local_world, message):
    """It arrived in time, and it is handled again only after the timeout."""
    timeout = timedelta(seconds=4)
    local_world.environment["TIMEOUT_SECONDS"] = str(timeout.total_seconds())
    local_world.inbox_options = {"REDELIVERY_AFTER": 1.5 * timeout.total_seconds(), "CONCURRENCY": 1}
    ask(is_answered=True)
    local_world.dies_at(f"before {ADD_PART} {message}", local_world.relay)
    local_world.relay()
    messages = InboxMessage.objects.filter(topic__in=[ASKED, ANSWERED])
    local_world.wait_until(lambda: messages.count() == 3 and not messages.filter(state__in=DUE).exists(), "all are handled")
    assert messages.filter(settled_at__gt=F("received_at") + timeout).exists()
    travel(timedelta(minutes=1))  # when the run looks again
    local_world.wait_until(local_world.is_quiet, "the request has ended")

    assert effects() == [("payment-1", "paid")]
    assert ended() == {"done"}
