"""A clock of the database that was ahead, as on a host that it was moved to: what waits because of it is named and mended.

The rows are as that clock would have written them.
"""

import json
import re
from datetime import timedelta
from functools import partial

import pytest
from django.db.models import F
from django.urls import reverse

from exactly_once.models import Alert, Process
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.alerting import Evaluator
from inbox.models import InboxMessage
from outbox.models import OutboxMessage, PausedTopic, PendingCallback
from outbox.states import State
from tests.support.admin_pages import staff_client, superuser_client
from tests.support.commands import output_of
from tests.support.deliveries import drain, effects, handed_over, the_effect
from tests.support.heartbeats import a_consumer, a_relay
from tests.support.relaying import published, set_columns
from tests.support.sql import executed

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.every_database]

HOUR = timedelta(hours=1)


status = partial(output_of, "exactly_once_status")


def mended():
    """Execute the statements that the status offers."""
    found = json.loads(status(json=True))
    statements = [one["statement"] for app in ("outbox", "inbox") for one in found[app]["ahead_of_the_clock"]]
    for statement in statements:
        executed(statement)
    return len(statements)


def silent():
    """The app and name of each silent process for which an alert is raised."""
    for app in ("outbox", "inbox"):
        evaluator = Evaluator(app, "default")
        for _ in range(3):
            evaluator.round()
        evaluator.release()
    raised = Alert.objects.filter(condition="silent", state="raised")
    assert not [alert.summary for alert in raised if "since the database's clock was ahead" not in alert.summary]
    return {(alert.app, alert.object) for alert in raised}


def overview():
    permissions = ["view_overview", "view_outboxmessage", "view_inboxmessage"]
    return staff_client(*permissions).get(reverse("admin:exactly_once_overview_changelist")).content.decode()


@pytest.fixture
def waits(handles):
    """Three messages that were handed over an hour ahead of the clock."""
    handler = handles(the_effect)
    for _ in range(3):
        handed_over(handler)
    InboxMessage.objects.update(received_at=F("received_at") + HOUR, next_attempt_at=F("next_attempt_at") + HOUR)


def test_messages_that_were_handed_over_ahead_of_the_clock_are_named_and_mended(waits):
    assert drain() == 0
    assert "3 rows of inbox_inboxmessage were written when the database's clock was 0:59:5" in status()
    assert "UPDATE inbox_inboxmessage SET next_attempt_at = " in status()
    assert "3 rows of inbox_inboxmessage were written" in overview().replace("&#x27;", "'")

    assert mended() == 1

    assert drain() == effects() == 3
    assert "ahead" not in status()
    assert mended() == 0


def test_retries_and_probes_that_were_computed_ahead_of_the_clock_are_named_and_mended(handles):
    handed_over(handles(the_effect))
    soon = DatabaseTime(HOUR + timedelta(seconds=10))
    InboxMessage.objects.update(state="retrying", failed_at=DatabaseTime(HOUR), next_attempt_at=soon)
    message = published("t")
    set_columns(message, state=State.RETRYING, failed_at=DatabaseTime(HOUR), available_at=soon)
    PausedTopic.objects.create(topic="shop.refused", mode="refused", paused_at=DatabaseTime(HOUR), probe_at=soon)
    PendingCallback.objects.create(message_id=message.id, event="published", settled_at=DatabaseTime(HOUR), available_at=soon)
    page = superuser_client().get(reverse("admin:exactly_once_overview_changelist")).content.decode()
    links = {table: link for link, table in re.findall(r'<a href="([^"]*)">1 rows of (\w+) were written', page)}
    assert links == {
        "inbox_inboxmessage": reverse("admin:inbox_inboxmessage_changelist") + "?state=retrying",
        "outbox_outboxmessage": reverse("admin:outbox_outboxmessage_changelist") + "?state=retrying",
        "outbox_pausedtopic": reverse("admin:outbox_pausedtopic_changelist"),
        "outbox_pendingcallback": reverse("admin:outbox_pendingcallback_changelist"),
    }

    assert mended() == 4

    assert drain() == 1
    assert PausedTopic.objects.filter(probe_at__lte=DatabaseTime()).exists()
    assert OutboxMessage.objects.filter(available_at__lte=DatabaseTime()).count() == 1


def test_messages_that_wait_by_the_present_clock_are_not_named(handles):
    handed_over(handles(the_effect))
    InboxMessage.objects.update(state="retrying", failed_at=DatabaseTime(), next_attempt_at=DatabaseTime(HOUR))
    set_columns(published("t", delay=HOUR), failed_at=None)

    assert mended() == 0


def test_process_whose_heartbeat_is_ahead_of_the_clock_is_silent():
    a_relay()
    a_consumer()
    Process.objects.update(beat_at=DatabaseTime(HOUR))

    text = status()

    assert text.count("silent") == 2
    assert "0:59:5" in text
    assert "No relay is running" in overview()
    found = json.loads(status(json=True))
    assert [row["silent"] for row in (*found["outbox"]["relays"], *found["inbox"]["consumers"])] == [True, True]


def test_process_whose_heartbeat_is_ahead_of_the_clock_is_reported_until_one_is_started_on_its_host():
    for a_process in (a_relay, a_consumer):
        a_process(host="gone")
    Process.objects.update(beat_at=DatabaseTime(HOUR))
    for a_process in (a_relay, a_consumer):
        a_process(host="older", running_for=6 * HOUR)

    assert silent() == {("outbox", "gone:4711"), ("inbox", "gone:4712")}
    assert overview().count("since the database's clock was ahead: killed, or frozen.") == 2
    assert "for -" not in overview()

    for a_process in (a_relay, a_consumer):
        a_process(host="gone", pid=12, running_for=timedelta(minutes=1))

    assert silent() == set()
    assert "killed, or frozen" not in overview()


def test_process_that_was_started_ahead_of_the_clock_is_replaced_by_one_that_was_started_by_the_present_clock():
    a_relay(host="gone")
    Process.objects.update(started_at=DatabaseTime(HOUR / 2), beat_at=DatabaseTime(HOUR))
    a_relay(host="gone", pid=12, running_for=timedelta(minutes=1))

    assert silent() == set()


@pytest.mark.parametrize("seconds", [-10, 10])
def test_process_whose_clock_was_corrected_by_seconds_is_not_silent(seconds):
    a_relay()
    Process.objects.update(beat_at=DatabaseTime(timedelta(seconds=seconds)))

    assert "silent" not in status()
