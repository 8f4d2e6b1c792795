"""Requests and answers while processes are killed: either the answer or the timeout has its effect, exactly once."""

from datetime import timedelta

import pytest
from django.db import transaction
from django.db.models import F

from exactly_once.models import Lease
from exactly_once.wire.context import Cause, caused_by
from inbox.contrib.joins.models import Part
from inbox.contrib.joins.store import TOPIC
from inbox.models import InboxMessage
from inbox.states import DUE
from inbox.testing import travel
from outbox import publish, request
from tests.support.apps.effects.models import Effect
from tests.support.apps.joined import ANSWERED, ASKED
from tests.support.crash.points import ADD_PART, COMMIT, EFFECT, GATHER, MAKE_DUE

POINTS = {
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


@pytest.fixture
def local(local_world):
    local_world.environment["DJANGO_SETTINGS_MODULE"] = "tests.support.apps.joined.settings"
    return local_world


def ask(*, is_answered):
    with transaction.atomic():
        return request(ASKED, {"payment": "payment-1", "is_answered": is_answered})


def ended():
    return set(InboxMessage.objects.filter(topic=TOPIC).values_list("state", flat=True))


def effects():
    return list(Effect.objects.values_list("name", "detail"))


@pytest.mark.every_database
@pytest.mark.parametrize("name", POINTS)
def test_a_process_killed_at_any_step_handles_the_answer_once(local, name):
    ask(is_answered=True)
    local.dies_at(POINTS[name], local.relay)
    Lease.objects.all().delete()  # SQLite's, as if it had run out
    local.relay()
    local.wait_until(lambda: ended() == {"done"} and local.is_quiet(), "the answer is handled")

    assert effects() == [("payment-1", "paid")]


@pytest.mark.every_database
@pytest.mark.parametrize("name", AT_THE_TIMEOUT)
def test_a_process_killed_at_the_timeout_handles_it_once_and_a_late_answer_is_a_dead_letter(local, name):
    asked = ask(is_answered=False)
    collector = local.relay()
    local.wait_until(lambda: Part.objects.exists() and collector.is_ready, "the request is collected")
    local.end(collector)
    travel(timedelta(hours=1))
    local.dies_at(AT_THE_TIMEOUT[name], local.relay)
    Lease.objects.all().delete()
    local.relay()
    local.wait_until(lambda: ended() == {"done"} and local.is_quiet(), "the timeout is handled")
    with transaction.atomic(), caused_by(Cause(correlation_id=str(asked.id))):
        publish(ANSWERED, {"result": "paid"})
    local.wait_until(lambda: InboxMessage.objects.filter(topic=ANSWERED, state="dead").exists(), "the late answer is visible")

    assert effects() == [("payment-1", "no answer")]


@pytest.mark.parametrize("message", [1, 2], ids=["the request", "the answer"])
def test_a_message_that_a_killed_process_had_claimed_is_not_missing_at_the_timeout(local, message):
    """It arrived in time, and it is handled again only after the timeout."""
    timeout = timedelta(seconds=6)
    local.environment["TIMEOUT_SECONDS"] = str(timeout.total_seconds())
    local.inbox_options = {"REDELIVERY_AFTER": 1.5 * timeout.total_seconds(), "CONCURRENCY": 1}
    ask(is_answered=True)
    local.dies_at(f"before {ADD_PART} {message}", local.relay)
    local.relay()
    messages = InboxMessage.objects.filter(topic__in=[ASKED, ANSWERED])
    local.wait_until(lambda: messages.count() == 3 and not messages.filter(state__in=DUE).exists(), "all are handled")
    assert messages.filter(settled_at__gt=F("received_at") + timeout).exists()
    travel(timedelta(minutes=1))  # when the run looks again
    local.wait_until(local.is_quiet, "the request has ended")

    assert effects() == [("payment-1", "paid")]
    assert ended() == {"done"}
