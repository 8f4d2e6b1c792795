"""`exactly_once_purge` for each app: what is older than its retention is deleted; what is open or dead stays."""

import re
import uuid
from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command

from exactly_once.models import AuditEntry
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.housekeeping import delete_in_chunks, older_entries
from inbox.models import InboxMessage, Receipt
from inbox.models import TrailEntry as InboxEntry
from inbox.states import State as InboxState
from outbox.models import OutboxMessage, TrailEntry
from outbox.states import State
from outbox.store import history
from tests.support.commands import output_of
from tests.support.inbox_rows import make_older, store_message
from tests.support.relaying import published, set_columns

pytestmark = [pytest.mark.every_database, pytest.mark.django_db]

DAY = timedelta(days=1)
MODELS = {"outbox": OutboxMessage, "inbox": InboxMessage}
BOTH = pytest.mark.parametrize("app", MODELS)


@pytest.fixture(autouse=True)
def handler(handles):
    """The command leaves the messages of other services."""
    handles(print, topic="t", name="h")


def purged(app=None, **options):
    """The numbers that the command prints, by what they count."""
    said = output_of("exactly_once_purge", app=app, **options)
    assert re.findall(r"^(outbox|inbox) ", said, re.MULTILINE) == ([app] if app else ["outbox", "inbox"])
    return {name: int(count) for name, count in re.findall(r"^(.*\S) +(\d+)$", said, re.MULTILINE)}


def settled(state, age):
    if isinstance(state, State):
        set_columns(published(), state=state, settled_at=DatabaseTime(-age))
        return
    values = {"handler": "h", "topic": "t", "body": b"{}", "headers": {}, "state": state}
    row = store_message(**values, biz_id=uuid.uuid4(), received_at=DatabaseTime(-age), settled_at=DatabaseTime(-age))
    make_older(InboxMessage.objects.filter(pk=row.pk), age)


def left():
    return sorted(state for model in MODELS.values() for state in model.objects.values_list("state", flat=True))


@pytest.mark.parametrize(
    ("state", "retention"),
    [
        *((state, 7) for state in (State.PUBLISHED, State.CANCELLED, State.EXPIRED, State.ROLLED_BACK)),
        *((state, 7) for state in (InboxState.DONE, InboxState.SKIPPED, InboxState.SHED)),
    ],
)
def test_purge_deletes_settled_messages_older_than_their_retention_and_dry_run_only_counts(state, retention):
    app = "outbox" if isinstance(state, State) else "inbox"
    settled(state, (retention + 1) * DAY)
    settled(state, (retention - 1) * DAY)

    assert purged(app, dry_run=True)["messages"] == 1
    assert left() == [state, state]
    assert purged(app)["messages"] == 1
    assert left() == [state]
    assert AuditEntry.objects.get().app == app


def test_purge_without_a_choice_purges_both_apps_and_receipts_by_the_retention_of_the_inbox():
    settled(State.PUBLISHED, 400 * DAY)
    settled(InboxState.DONE, 400 * DAY)
    settled(InboxState.SKIPPED, 300 * DAY)

    assert purged(older_than="1d")["receipts"] == 1

    assert (left(), Receipt.objects.count()) == ([], 1)


@pytest.mark.parametrize(
    "state",
    [
        *(State.DEAD, State.RETRYING, State.READY, State.SCHEDULED, State.PREPARED),
        *(InboxState.DEAD, InboxState.RETRYING, InboxState.WAITING, InboxState.RECEIVED),
    ],
)
def test_purge_keeps_dead_and_unsettled_messages(state):
    settled(state, 900 * DAY)

    purged(older_than="400d")

    assert left() == [state]


@BOTH
def test_purge_deletes_messages_older_than_the_given_age_and_refuses_an_impossible_one(app):
    settled({"outbox": State.PUBLISHED, "inbox": InboxState.DONE}[app], 400 * DAY)

    for age in ("nan", "inf", "1e300", "900000d", "-1d", "30"):
        with pytest.raises(CommandError, match="older-than is"):
            call_command("exactly_once_purge", "--app", app, f"--older-than={age}")
    assert purged(app, older_than="401d")["messages"] == 0
    assert purged(app, older_than="399d")["messages"] == 1


def test_purge_deletes_in_chunks():
    for _ in range(7):
        settled(State.PUBLISHED, 8 * DAY)

    assert list(history.HISTORY.purge("default", DAY, chunk=3)) == [3, 3, 1]
    assert left() == []


@pytest.mark.parametrize(("app", "trail", "named"), [("outbox", TrailEntry, {}), ("inbox", InboxEntry, {"handler": "h"})])
def test_purge_deletes_trail_entries_older_than_the_retention_in_small_transactions(app, trail, named):
    for age in (31, 32, 33, 29):
        values = {"message_id": uuid.uuid4(), "was": "", "became": "done", "at": DatabaseTime(-age * DAY), "process": "p"}
        trail.objects.create(**values, **named)

    assert purged(app, dry_run=True)["entries of the trail"] == 3
    assert next(delete_in_chunks(older_entries(trail, "default", 30 * DAY), by="at", chunk=1)) == 1
    assert purged(app)["entries of the trail"] == 2
    assert trail.objects.count() == 1
