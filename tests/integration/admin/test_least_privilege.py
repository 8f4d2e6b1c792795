"""What a user of the admin without a permission does not see, and what a user who has lost one no longer causes."""

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.urls import reverse

from exactly_once.models import AuditEntry, Operation
from exactly_once.process.clock import utcnow
from exactly_once.process.loop import StopRequest
from exactly_once.upkeep.executing import Operations
from inbox import Lease
from inbox.contrib.outgoing_webhooks import Endpoint
from inbox.models import InboxMessage
from inbox.states import State
from tests.support.admin_pages import Page, a_message, act, act_on_all, staff_client
from tests.support.deliveries import an_envelope, deliver, drain, fails, options

pytestmark = pytest.mark.django_db(databases=["default", "other"])

INBOX_LIST = "admin:inbox_inboxmessage_changelist"
VIEW_INBOX, STEPS, LIFE = "view_inboxmessage", "view_step", "view_trailentry"


@pytest.fixture
def with_a_step(handles):
    """A dead message whose handler has taken a step with a secret result."""

    def charge(message):
        message.step("take-the-money", lambda: {"card": "4111-1111"})
        raise ValueError("no stock")

    deliver(handles(charge, lease=Lease()), an_envelope(), given=options(MAX_ATTEMPTS=1))
    drain(options(MAX_ATTEMPTS=1))
    row = InboxMessage.objects.get()
    assert (row.state, row.steps.count()) == (State.DEAD, 1)
    return row


def page_of(row, *permissions):
    app, model = row._meta.app_label, row._meta.model_name
    return Page(staff_client(*permissions).get(reverse(f"admin:{app}_{model}_change", args=[row.pk]))).text


def test_steps_of_a_message_are_shown_only_with_their_permission(with_a_step):
    without, with_it = page_of(with_a_step, VIEW_INBOX), page_of(with_a_step, VIEW_INBOX, STEPS)

    assert "4111-1111" in with_it
    assert "4111-1111" not in without
    assert "take-the-money" not in without


def test_results_of_steps_are_not_shown_while_payloads_are_redacted(with_a_step, settings):
    settings.INBOX = {"REDACT": "tests.support.redactors.mask"}
    page = page_of(with_a_step, VIEW_INBOX, STEPS)

    assert "take-the-money" in page
    assert "4111-1111" not in page
    assert "Not shown, because payloads are redacted." in page


@pytest.mark.parametrize("app", ["outbox", "inbox"])
def test_life_of_a_message_is_shown_only_with_its_permission(app, with_a_step):
    row = a_message() if app == "outbox" else with_a_step
    view = f"view_{app}message"

    assert "Timeline" not in page_of(row, view)
    assert "Timeline" in page_of(row, view, LIFE)


def test_query_of_an_endpoints_url_is_not_in_the_audit_log():
    client = staff_client("add_endpoint", "edit_endpoint", "view_endpoint", "view_auditentry")
    fields = {"name": "partner", "url": "https://example.com/hooks?token=s3cret", "topics": "[]", "concurrency": "2"}
    client.post(reverse("admin:inbox_outgoing_webhooks_endpoint_add"), fields)
    row = Endpoint.objects.get()
    changed = {"confirmed": "yes", "reason": "moved", "url": "https://example.com/new?token=s3cret"}
    act(client, "edit", row, page="admin:inbox_outgoing_webhooks_endpoint_changelist", **changed)
    assert Endpoint.objects.get().url == changed["url"]

    urls = [entry.parameters["url"] for entry in AuditEntry.objects.order_by("pk")]
    assert urls == ["https://example.com/hooks?…", "https://example.com/new?…"]
    assert "s3cret" not in Page(client.get(reverse("admin:exactly_once_auditentry_changelist"))).text


PAGES = {
    model._meta.model_name: model
    for model in admin.site._registry
    if model._meta.proxy and model._meta.concrete_model is AuditEntry
}
"""Those that have no rows: their models are proxies for a permission and a name."""


@pytest.mark.parametrize("view", ["change/", "history/", "delete/", ""])
@pytest.mark.parametrize("name", sorted(PAGES))
def test_page_without_rows_shows_no_entry_of_the_audit_log(name, view):
    entry = AuditEntry.objects.create(
        app="outbox", at=utcnow(), actor="ada", place="admin", address="10.9.8.7", action="cancel", kind="message", name="m-1"
    )
    client, page = staff_client(f"view_{name}"), reverse(f"admin:exactly_once_{name}_changelist")

    assert Page(client.get(page))
    answer = client.get(f"{page}{entry.pk}/{view}", follow=True)
    assert answer.status_code == 404
    assert "10.9.8.7" not in answer.content.decode()


REVOCATIONS = {
    "permission": lambda user: user.user_permissions.clear(),
    "active": lambda user: User.objects.filter(pk=user.pk).update(is_active=False),
    "staff": lambda user: User.objects.filter(pk=user.pk).update(is_staff=False),
    "account": lambda user: user.delete(),
}


@pytest.mark.parametrize("revoke", [None, *REVOCATIONS])
def test_planned_operation_of_a_user_without_the_permission_any_more_stops_and_changes_nothing(revoke, handles):
    handler = handles(fails)
    for _ in range(3):
        deliver(handler, an_envelope(), given=options(MAX_ATTEMPTS=1))
    client = staff_client(VIEW_INBOX, "skip_inboxmessage")
    act_on_all(client, "skip", page=INBOX_LIST, query="?state=dead", reason="wrong")
    operation = Operation.objects.get()
    user = User.objects.get(username=operation.requested_by)
    name = user.get_username()
    if revoke:
        REVOCATIONS[revoke](user)

    Operations("inbox", ["default"]).drain(StopRequest())

    operation.refresh_from_db()
    states = set(InboxMessage.objects.values_list("state", flat=True))
    if revoke is None:
        assert (operation.state, states) == ("finished", {State.SKIPPED})
    else:
        assert (operation.state, states) == ("stopped", {State.DEAD})
        because = f"{name} is no longer an active member of staff with inbox.skip_inboxmessage"
        assert because in page_of(operation, VIEW_INBOX)
