"""Every page and every action of the admin is refused without its own permission, and no row is changed but by actions."""

import hashlib
import json
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

import pytest
from django.contrib import admin
from django.contrib.auth.models import Group, Permission, User
from django.test import Client
from django.urls import reverse

from exactly_once.console.admin.pages import PageAdmin
from exactly_once.models import Alert, AuditEntry, FailureNote, Operation, Process
from exactly_once.process.clock import utcnow
from exactly_once.sql.now import DatabaseTime
from inbox.contrib.joins.models import Run
from inbox.contrib.outgoing_webhooks import Endpoint
from inbox.models import InboxMessage, PausedHandler
from inbox.operators.editing import conflict_token
from outbox.models import PausedTopic, PendingCallback
from outbox.states import State
from tests.support.admin_pages import a_message, staff_client, superuser_client
from tests.support.commands import output_of
from tests.support.deliveries import deliver, fails, run_to_the_end
from tests.support.heartbeats import a_relay
from tests.support.inbox_rows import store_message
from tests.support.joins import TOPICS, comes, report
from tests.support.lower_bounds import at_least

pytestmark = pytest.mark.django_db(databases=["default", "other"])

APPS = {"exactly_once", "outbox", "inbox", "inbox_joins", "inbox_outgoing_webhooks"}
OURS = {model._meta.label: model_admin for model, model_admin in admin.site._registry.items() if model._meta.app_label in APPS}
DECLARED = {(label, action.name): action for label, model_admin in OURS.items() for action in (model_admin.actions or ())}
ACTIONS = list(DECLARED)
ALSO = {"outbox.PendingCallback": ["view_outboxmessage"]}
"""Further permissions that a page needs, because it shows rows of another model."""
ADDED = {"outbox.PausedTopic", "inbox.PausedHandler", "inbox_outgoing_webhooks.Endpoint"}
VIEWED_WITH = {f"exactly_once.{model}": "view_outboxmessage" for model in ("Operation", "FailureNote")}
"""Pages about messages, which are viewed with the permission to view these."""
PAGES = {label for label, model_admin in OURS.items() if isinstance(model_admin, PageAdmin)}
"""Those that have no rows: one URL."""
CONFIRMED = {"confirmed": "yes", "reason": "x"}
FIELDS = {
    "overdue": "on",
    "delay": "2h",
    "seconds": "5",
    "minutes": "60",
    "payload": '{"a": 1}',
    "shown": hashlib.sha256(b'{"a": 1}').hexdigest(),
    "payloads": json.dumps({topic: {} for topic in TOPICS[1:]}),
}
"""What the actions ask for."""
NEEDED = {
    **dict.fromkeys(("commit", "roll_back", "ask_again"), State.STUCK),
    **dict.fromkeys(("publish_now", "reschedule"), State.SCHEDULED),
    **dict.fromkeys(("restore", "export"), State.DEAD),
}
"""The state of an outbox message on which an action has an effect; by default any."""


EFFECTIVE = {
    ("exactly_once.Process", "resume"): {"mode": "paused"},
    ("exactly_once.Operation", "continue"): {"state": "stopped"},
    ("inbox.InboxMessage", "override_maximum_age"): {"quarantined": True},
    ("inbox.InboxMessage", "run_conflicting"): {
        "conflicts": 1,
        "conflicting_id": "other",
        "conflicting_body": b"{}",
        "conflicting_at": utcnow(),
        "duplicates": 1,
        "conflicting_attributes": {
            **dict.fromkeys(("key", "source", "correlation_id", "causation_id", "traceparent"), ""),
            "content_type": "application/json",
            "headers": "{}",
            "created_at": None,
        },
    },
    ("inbox_outgoing_webhooks.Endpoint", "enable"): {"state": "disabled"},
}
"""Columns with which an action has an effect on the row of its page."""


def url_of(label, page="changelist", *args):
    app, model = label.lower().split(".")
    return reverse(f"admin:{app}_{model}_{page}", args=args)


def name_of(action, model_admin):
    """The permission of an action, without the app. An operation has that of its own action."""
    return "cancel_outboxmessage" if action.may else action.codename(model_admin.model).partition(".")[2]


def view_permission(label):
    """A proxy without a permission of its own is viewed with that of its model."""
    if label in VIEWED_WITH:
        return VIEWED_WITH[label]
    model = OURS[label].model
    viewed = model if "view" in model._meta.default_permissions else model._meta.concrete_model
    return f"view_{viewed._meta.model_name}"


def a_pending_callback():
    message = a_message(State.PUBLISHED, settled_at=DatabaseTime())
    times = {"settled_at": DatabaseTime(), "available_at": DatabaseTime()}
    return PendingCallback.objects.create(message_id=message.message_id, event="published", callback="x", **times)


def an_alert():
    times = {"first_seen_at": DatabaseTime(), "seen_at": DatabaseTime(), "raised_at": DatabaseTime()}
    return Alert.objects.create(app="outbox", state="raised", **times)


def a_run():
    at = utcnow()
    row = store_message(handler="shop.report", topic="inbox.join", biz_id="r", state="dead", body=b"{}", received_at=at)
    return Run.objects.create(handler="shop.report", run_id="r", row=row, opened_at=at, deadline_at=at)


@pytest.fixture
def a_row(handles):
    """A row for each page, by the label of its model."""

    def a_dead_letter():
        deliver(handles(fails, name="tests.h"))
        run_to_the_end()
        return InboxMessage.objects.get()

    paused = {"paused_by": "ada", "paused_at": DatabaseTime()}
    makers = {
        "outbox.OutboxMessage": a_message,
        "exactly_once.Alert": an_alert,
        "exactly_once.Operation": partial(Operation.objects.create, app="outbox", action="cancel", planned_at=DatabaseTime()),
        "exactly_once.FailureNote": partial(
            FailureNote.objects.create, app="outbox", error_class="x", written_at=DatabaseTime()
        ),
        "exactly_once.AuditEntry": partial(AuditEntry.objects.create, app="outbox", at=DatabaseTime()),
        "outbox.PausedTopic": partial(PausedTopic.objects.create, topic="shop.t", **paused),
        "inbox.PausedHandler": partial(PausedHandler.objects.create, handler="shop.h", **paused),
        "exactly_once.Process": lambda: Process.objects.get(pk=a_relay().id),
        "outbox.PendingCallback": a_pending_callback,
        "inbox.InboxMessage": a_dead_letter,
        "inbox_joins.Run": a_run,
        "inbox_outgoing_webhooks.Endpoint": partial(Endpoint.objects.create, name="partner", url="https://example.com/hooks"),
    }

    # A page without rows of its own, such as the overview, has a list only.
    return lambda label: makers[label]() if label in makers else None


@pytest.fixture
def a_row_to_act_on(a_row, joins):
    """A row on which an action has an effect."""

    def make(label, action):
        if label == "inbox_joins.Run":
            joins(report)
            comes(TOPICS[0], "r")
            return Run.objects.get()
        if label == "outbox.OutboxMessage" and action in NEEDED:
            return a_message(NEEDED[action], due_ago=-timedelta(hours=1))
        row = a_row(label)
        if given := EFFECTIVE.get((label, action)):
            type(row).objects.filter(pk=row.pk).update(**given)
            row.refresh_from_db()
        if action == "continue":
            row.parts.create(rows=[1])
        return row

    return make


@pytest.mark.parametrize("label", sorted(OURS))
def test_page_is_refused_without_the_view_permission(label, a_row):
    row = a_row(label)

    for client in (staff_client(), staff_client("view_user")):
        assert client.get(url_of(label)).status_code == 403
        if row is not None:
            assert client.get(url_of(label, "change", row.pk), follow=True).status_code == 403


@pytest.mark.parametrize("label", sorted(OURS))
def test_page_is_shown_with_the_view_permission_alone(label, a_row):
    row = a_row(label)
    client = staff_client(view_permission(label), *ALSO.get(label, []))

    assert client.get(url_of(label)).status_code == 200
    if row is not None:
        assert client.get(url_of(label, "change", row.pk), follow=True).status_code == 200


@pytest.mark.parametrize("label", sorted(ALSO))
def test_page_about_messages_is_refused_without_either_of_its_permissions(label, a_row):
    row = a_row(label)

    for codename in (view_permission(label), *ALSO[label]):
        client = staff_client(codename)
        assert [client.get(url_of(label, *page)).status_code for page in ((), ("change", row.pk))] == [403, 403]


@pytest.mark.parametrize("label", sorted(OURS.keys() - PAGES))
def test_row_is_changed_and_deleted_by_actions_only_and_added_only_where_there_is_a_form_for_it(label, a_row):
    row = a_row(label)
    client = superuser_client()

    assert (client.get(url_of(label, "add")).status_code == 200) == (label in ADDED)
    if row is not None:
        before = values_of(row)
        for page, given in (("change", dict.fromkeys(before, "changed")), ("delete", {"post": "yes"})):
            response = client.post(url_of(label, page, row.pk), given)
            assert response.status_code in {302, 403}, "a row of another page leads to that page"
        assert values_of(row) == before


@pytest.mark.django_db(transaction=True, databases=["default", "other"])  # a dry run has a connection of its own
@pytest.mark.parametrize(("label", "action"), ACTIONS)
def test_action_does_nothing_without_its_permission_and_is_done_and_recorded_with_it(label, action, a_row_to_act_on):
    row = a_row_to_act_on(label, action)
    before = values_of(row)
    own = name_of(DECLARED[label, action], OURS[label])
    others = set(Permission.objects.filter(content_type__app_label__in=APPS).values_list("codename", flat=True))
    assert own in others, "the permission exists"
    posted = {"action": action, "_selected_action": [str(row.pk)], **CONFIRMED, **FIELDS}
    if action == "run_conflicting":
        posted["shown"] = conflict_token(row)

    response = staff_client(*(others - {own})).post(url_of(label), posted)

    assert response.status_code in {200, 302, 403}
    assert values_of(row) == before
    assert recorded() == []

    response = staff_client(*others).post(url_of(label), posted)

    assert response.status_code in {200, 302}
    assert recorded() == [action]


@pytest.mark.parametrize(("label", "action"), [one for one in ACTIONS if DECLARED[one].question])
def test_action_with_a_question_names_its_rows_and_does_nothing_until_it_is_confirmed(label, action, a_row_to_act_on):
    row = a_row_to_act_on(label, action)
    before = values_of(row)

    response = superuser_client().post(url_of(label), {"action": action, "_selected_action": [str(row.pk)]})

    assert f'name="_selected_action" value="{row.pk}"' in response.content.decode()
    assert (values_of(row), recorded()) == (before, [])


def recorded():
    """The actions in the audit log."""
    return list(AuditEntry.objects.values_list("action", flat=True))


@pytest.mark.parametrize(("label", "action"), ACTIONS)
def test_action_without_a_csrf_token_is_refused(label, action, a_row):
    row = a_row(label)
    before = values_of(row)
    user = User.objects.create_superuser("root")
    client = Client(enforce_csrf_checks=True)
    client.force_login(user)

    response = client.post(url_of(label), {"action": action, "_selected_action": [str(row.pk)], **CONFIRMED})

    assert response.status_code == 403
    assert values_of(row) == before


def forms_beside_the_actions(a_row):
    """Path and fields of every form that changes something and is not an action of a list."""
    for app in ("outbox", "inbox"):
        group = f"{reverse('admin:exactly_once_failurenote_group')}?app={app}&class=x&place=y"
        yield group, {"action": "note", "note": "x"}
        yield group, {"action": "cancel" if app == "outbox" else "skip", "plan_confirmed": "1", "reason": "x"}
    yield url_of("outbox.PausedTopic", "add"), {"topic": "t", "reason": "x"}
    yield url_of("inbox.PausedHandler", "add"), {"handler": "h", "reason": "x"}
    yield (
        url_of("inbox_outgoing_webhooks.Endpoint", "add"),
        {"name": "h", "url": "https://example.com", "topics": "[]", "concurrency": 2},
    )


def test_forms_beside_the_actions_are_refused_without_a_csrf_token_and_change_nothing_by_get(a_row):
    forms = list(forms_beside_the_actions(a_row))
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_superuser("root"))

    for path, fields in forms:
        assert client.post(path, fields).status_code == 403, path
        asked = f"{path}{'&' if '?' in path else '?'}{urlencode(fields)}"
        assert client.get(asked).status_code in {200, 405}, path

    assert not FailureNote.objects.exists()
    assert not Operation.objects.exists()
    assert not AuditEntry.objects.exists()
    assert not PausedTopic.objects.exists()
    assert not PausedHandler.objects.exists()
    assert not Endpoint.objects.exists()


@pytest.mark.parametrize("label", ["outbox.PausedTopic", "inbox.PausedHandler"])
def test_pausing_is_refused_without_its_permission(label):
    client = staff_client(view_permission(label), "resume_pausedtopic", "resume_pausedhandler")

    assert client.get(url_of(label, "add")).status_code == 403
    assert client.post(url_of(label, "add"), {"topic": "t", "handler": "h"}).status_code == 403
    assert not PausedTopic.objects.exists()
    assert not PausedHandler.objects.exists()


def values_of(row):
    """The columns of a row now; None if it was deleted."""
    return type(row).objects.filter(pk=row.pk).values().first()


class TestRoles:
    def test_viewer_may_look_and_operator_may_do_everything_but_see_payloads_unredacted(self):
        output_of("exactly_once_roles")
        viewer, operator = (Group.objects.get(name=f"Exactly once {role}") for role in ("viewer", "operator"))

        every = set(Permission.objects.filter(content_type__app_label__in=APPS).values_list("codename", flat=True))
        by_hand = {"export_outboxmessage", "export_inboxmessage", "unredacted_inboxmessage", "secret_endpoint"}
        assert by_hand < every
        assert set(operator.permissions.values_list("codename", flat=True)) == every - by_hand
        assert set(viewer.permissions.values_list("codename", flat=True)) == {
            name for name in every if name.startswith("view_")
        }

    @pytest.mark.long
    def test_viewer_sees_every_page_without_any_action(self, a_row):
        output_of("exactly_once_roles")
        user = User.objects.create_user("viewer", is_staff=True)
        user.groups.set(Group.objects.filter(name__endswith=" viewer"))
        client = Client()
        client.force_login(user)

        for label in OURS:
            response = client.get(url_of(label))
            assert response.status_code == 200, label
            assert b'name="_selected_action"' not in response.content, label
            if label not in PAGES:
                assert client.get(url_of(label, "add")).status_code == 403, label

    def test_command_may_be_run_again_and_removes_what_was_added_by_hand(self):
        output_of("exactly_once_roles")
        viewer = Group.objects.get(name="Exactly once viewer")
        viewer.permissions.add(Permission.objects.get(codename="cancel_outboxmessage"))

        assert "Group 'Exactly once viewer' updated" in output_of("exactly_once_roles")
        assert not viewer.permissions.filter(codename="cancel_outboxmessage").exists()


def test_every_permission_is_documented():
    page = Path(__file__).parents[3].joinpath("docs/reference/permissions.md").read_text()
    every = Permission.objects.filter(content_type__app_label__in=APPS)
    assert [one.codename for one in at_least(30, every) if f"`{one.codename}`" not in page] == []


def test_table_of_the_actions_is_that_of_the_declared_actions():
    page = Path(__file__).parents[3].joinpath("docs/reference/permissions.md").read_text()
    declared = [
        f"| {model_admin.opts.verbose_name_plural.capitalize()} | {action.label} | `{name_of(action, model_admin)}` | "
        f"{', '.join(f'`{state}`' for state in action.sources)} | {'yes' if action.is_operation else ''} |"
        for model_admin in OURS.values()
        if not model_admin.model._meta.proxy  # their actions are among those of all messages
        for action in (*(model_admin.actions or ()), *filter(None, [getattr(model_admin, "adds", None)]))
        if not action.may  # that of another action
    ]
    start = page.index("| page | action |")
    assert page[start : page.index("\n\n", start)].splitlines()[2:] == sorted(declared)
