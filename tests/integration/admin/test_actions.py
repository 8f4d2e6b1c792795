"""Actions on messages in both apps: each changes what it may, reports every message, and records who did it and why."""

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.urls import reverse
from django.utils.text import capfirst

from exactly_once.models import AuditEntry
from inbox.models import InboxMessage
from inbox.models import TrailEntry as InboxTrailEntry
from inbox.states import State as InboxState
from outbox.models import OutboxMessage, TrailEntry
from outbox.states import State
from tests.support.admin_names import CANCEL, DECIDE, RESCHEDULE, RESTORE
from tests.support.admin_pages import a_message, act, an_inbox_message, changed, said, staff_client
from tests.support.inbox_rows import settle

pytestmark = [pytest.mark.django_db(databases=["default", "other"]), pytest.mark.every_database]


class Outbox:
    name, model, trail = "outbox", OutboxMessage, TrailEntry
    message, meanwhile = staticmethod(a_message), staticmethod(changed)

    @staticmethod
    def subject(row):
        return f"Message {row.message_id} ({row.topic} {row.biz_id})"


class Inbox:
    name, model, trail = "inbox", InboxMessage, InboxTrailEntry
    message = staticmethod(an_inbox_message)

    @staticmethod
    def meanwhile(row, state):
        settle(InboxMessage.objects.filter(pk=row.pk))

    @staticmethod
    def subject(row):
        return f"Message {row.message_id} ({row.topic} {row.biz_id}, {row.handler})"


@pytest.mark.parametrize(
    ("half", "action", "permission", "was", "became", "done", "meanwhile"),
    [
        (Outbox, "restore", RESTORE, State.DEAD, State.READY, "restored", State.PUBLISHED),
        (Outbox, "cancel", CANCEL, State.SCHEDULED, State.CANCELLED, "cancelled", State.PUBLISHED),
        (Outbox, "publish_now", RESCHEDULE, State.SCHEDULED, State.READY, "to be published now", State.PUBLISHED),
        (Outbox, "commit", DECIDE, State.PREPARED, State.READY, "committed", State.ROLLED_BACK),
        (Outbox, "commit", DECIDE, State.STUCK, State.READY, "committed", State.ROLLED_BACK),
        (Outbox, "roll_back", DECIDE, State.PREPARED, State.ROLLED_BACK, "rolled back", State.PUBLISHED),
        (Outbox, "roll_back", DECIDE, State.STUCK, State.ROLLED_BACK, "rolled back", State.PUBLISHED),
        (Inbox, "retry", "retry_inboxmessage", InboxState.DEAD, InboxState.RETRYING, "due for a retry now", InboxState.DONE),
        (Inbox, "skip", "skip_inboxmessage", InboxState.DEAD, InboxState.SKIPPED, "skipped", InboxState.DONE),
        (
            *(Inbox, "override_maximum_age", "override_inboxmessage", InboxState.DEAD, InboxState.RETRYING),
            *("due now, past the maximum message age", InboxState.DONE),
        ),
    ],
)
def test_action_reports_each_message_and_records_the_user_and_the_reason(
    half, action, permission, was, became, done, meanwhile
):
    page = f"admin:{half.name}_{half.name}message"
    more = {"quarantined": True} if action == "override_maximum_age" else {}
    row, other = (half.message(was, attempts=3, **more) for _ in range(2))
    client = staff_client(f"view_{half.name}message", permission)
    asks = action != "retry"
    if asks:
        assert str(row.message_id) in act(client, action, row, other, page=f"{page}_changelist").content.decode()
        assert {half.model.objects.get(pk=each.pk).state for each in (row, other)} == {was}
    half.meanwhile(other, meanwhile)

    answers = {"confirmed": "yes", "reason": "the ledger says so", "overdue": "on"}
    response = act(client, action, row, other, page=f"{page}_changelist", query="?stuck=any", **(answers if asks else {}))

    assert said(response) == [
        ("success", f"{half.subject(row)}: {done}"),
        ("warning", f"{half.subject(other)}: not {done}: it is {meanwhile.label.lower()} now"),
    ]
    row, other = (half.model.objects.get(pk=each.pk) for each in (row, other))
    assert (row.state, other.state) == (became, meanwhile)
    assert action not in {"restore", "retry"} or row.attempts == 0
    user, reason = User.objects.get(), ": the ledger says so" if asks else "."
    who = f"by {user.username} in the admin"
    (entry,) = half.trail.objects.filter(message_id=row.message_id)
    assert (entry.was, entry.became) == (was, became)
    assert (f"the ledger says so; {who}" if action == "skip" else f"{who}{reason.removesuffix('.')}") in entry.reason
    logged, audited = LogEntry.objects.get(), AuditEntry.objects.get()
    assert (logged.object_id, logged.user_id, logged.change_message) == (str(row.pk), user.pk, f"{capfirst(done)}{reason}")
    assert (audited.object_id, audited.actor, audited.action) == (str(row.message_id), user.username, action)
    assert (audited.place, audited.address, audited.kind) == ("admin", "127.0.0.1", "message")
    assert audited.parameters == ({"reason": "the ledger says so", "overdue": "on"} if asks else {})
    assert client.get(reverse(f"{page}_history", args=[row.pk])).context["action_list"]


@pytest.mark.parametrize(
    ("action", "quarantined", "why"),
    [
        ("retry", True, "it is in quarantine; use “Retry past the maximum message age…”"),
        ("override_maximum_age", False, "it is not in quarantine; use “Retry now”"),
    ],
)
def test_action_on_a_message_names_the_one_that_is_possible(action, quarantined, why):
    row = an_inbox_message(quarantined=quarantined)
    client = staff_client("view_inboxmessage", "retry_inboxmessage", "override_inboxmessage")

    ((level, words),) = said(
        act(client, action, row, page="admin:inbox_inboxmessage_changelist", confirmed="yes", reason="because")
    )

    assert (level, words.endswith(why)) == ("warning", True)
    assert InboxMessage.objects.get(pk=row.pk).state == InboxState.DEAD
