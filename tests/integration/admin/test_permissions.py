"""Every page and every action of the admin is refused without its own permission, and no row is changed but by actions."""

import hashlib
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

import pytest
from django.contrib.auth.models import Group, Permission, User
from django.test import Client
from django.urls import reverse

from exactly_once.console.admin.pages import PageAdmin
from exactly_once.models import AuditEntry, FailureNote, Operation
from exactly_once.sql.now import DatabaseTime
from inbox.contrib.outgoing_webhooks import Endpoint
from inbox.models import PausedHandler
from inbox.operators.editing import conflict_token
from outbox.models import PausedTopic
from tests.support.admin_actions import ACTIONS, PAGES, TEXTS, rows_to_act_on
from tests.support.admin_pages import staff_client, superuser_client
from tests.support.commands import output_of
from tests.support.joins import report
from tests.support.lower_bounds import at_least
from tests.support.own_apps import OWN_APPS
from tests.support.shop_day import CHARGE, PLACED

pytestmark = pytest.mark.django_db(databases=["default", "other"])


ALSO = {"outbox.PendingCallback": ["view_outboxmessage"]}
"""Further permissions that a page needs, because it shows rows of another model."""
ADDED = {"outbox.PausedTopic", "inbox.PausedHandler", "inbox_outgoing_webhooks.Endpoint"}
VIEWED_WITH = {f"exactly_once.{model}": "view_outboxmessage" for model in ("Operation", "FailureNote")}
"""Pages about messages, which are viewed with the permission to view these."""
WITHOUT_ROWS = {label for label, model_admin in PAGES.items() if isinstance(model_admin, PageAdmin)}
"""Those that have no rows: one URL."""
SHOWN = hashlib.sha256(TEXTS["payload"].encode()).hexdigest()
GIVEN = {**TEXTS, "confirmed": "yes", "overdue": "on", "seconds": "5", "minutes": "60", "shown": SHOWN}
"""What the actions ask for."""


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
    model = PAGES[label].model
    viewed = model if "view" in model._meta.default_permissions else model._meta.concrete_model
    return f"view_{viewed._meta.model_name}"


@pytest.fixture
def a_row_to_act_on(handles, joins, tasked):
    """A row on which an action has an effect."""
    handles(print, name=CHARGE, topic=PLACED)
    joins(report)
    makers = rows_to_act_on()
    return lambda label, action: makers[label, action]()


@pytest.fixture
def a_row(a_row_to_act_on):
    """A row for each page, by the label of its model; None for a page without rows of its own, such as the overview."""
    others = {
        "exactly_once.FailureNote": partial(FailureNote.objects.create, app="outbox", written_at=DatabaseTime()),
        "exactly_once.AuditEntry": partial(AuditEntry.objects.create, app="outbox", at=DatabaseTime()),
    }
    actions = dict(ACTIONS)
    return lambda label: (
        a_row_to_act_on(label, actions[label]) if label in actions else others[label]() if label in others else None
    )


@pytest.mark.parametrize("label", sorted(PAGES))
def test_page_is_refused_without_the_view_permission_and_shown_with_it_alone(label, a_row):
    row, needed = a_row(label), [view_permission(label), *ALSO.get(label, [])]
    urls = [url_of(label), *([] if row is None else [url_of(label, "change", row.pk)])]

    def answers(*codenames):
        client = staff_client(*codenames)
        return {client.get(url, follow=True).status_code for url in urls}

    assert answers() == answers("view_user") == {403}
    for codename in ALSO.get(label, []):
        assert answers(codename) == answers(view_permission(label)) == {403}
    assert answers(*needed) == {200}


@pytest.mark.parametrize("label", sorted(PAGES.keys() - WITHOUT_ROWS))
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
def test_action_does_nothing_without_permission_csrf_token_or_confirmation_and_is_done_and_recorded_with_them(
    label, action, a_row_to_act_on
):
    row = a_row_to_act_on(label, action)
    before = values_of(row)
    own = name_of(ACTIONS[label, action], PAGES[label])
    every = set(Permission.objects.filter(content_type__app_label__in=OWN_APPS).values_list("codename", flat=True))
    assert own in every, "the permission exists"
    chosen = {"action": action, "_selected_action": [str(row.pk)]}
    given = {**chosen, **GIVEN, **({"shown": conflict_token(row)} if action == "run_conflicting" else {})}

    refused = [
        (staff_client(*(every - {own})), given, {200, 302, 403}),
        (without_a_csrf_token(), given, {403}),
        *([(superuser_client(), chosen, {200})] if ACTIONS[label, action].question else []),
    ]
    for client, fields, statuses in refused:
        response = client.post(url_of(label), fields)
        assert response.status_code in statuses
        assert (values_of(row), recorded()) == (before, [])
    if ACTIONS[label, action].question:
        assert f'name="_selected_action" value="{row.pk}"' in response.content.decode()

    response = staff_client(*every).post(url_of(label), given)

    assert response.status_code in {200, 302}
    assert recorded() == [action]


def without_a_csrf_token():
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_superuser("root"))
    return client


def recorded():
    """The actions in the audit log."""
    return list(AuditEntry.objects.values_list("action", flat=True))


def forms_beside_the_actions():
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


def test_forms_beside_the_actions_are_refused_without_a_csrf_token_and_change_nothing_by_get():
    forms = list(forms_beside_the_actions())
    client = without_a_csrf_token()

    for path, fields in forms:
        assert client.post(path, fields).status_code == 403, path
        asked = f"{path}{'&' if '?' in path else '?'}{urlencode(fields)}"
        assert client.get(asked).status_code in {200, 405}, path

    for model in (FailureNote, Operation, AuditEntry, PausedTopic, PausedHandler, Endpoint):
        assert not model.objects.exists(), model


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

        every = set(Permission.objects.filter(content_type__app_label__in=OWN_APPS).values_list("codename", flat=True))
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

        for label in PAGES:
            response = client.get(url_of(label))
            assert response.status_code == 200, label
            assert b'name="_selected_action"' not in response.content, label
            if label not in WITHOUT_ROWS:
                assert client.get(url_of(label, "add")).status_code == 403, label

    def test_command_may_be_run_again_and_removes_what_was_added_by_hand(self):
        output_of("exactly_once_roles")
        viewer = Group.objects.get(name="Exactly once viewer")
        viewer.permissions.add(Permission.objects.get(codename="cancel_outboxmessage"))

        assert "Group 'Exactly once viewer' updated" in output_of("exactly_once_roles")
        assert not viewer.permissions.filter(codename="cancel_outboxmessage").exists()


def test_every_permission_is_documented():
    page = Path(__file__).parents[3].joinpath("docs/reference/permissions.md").read_text()
    every = Permission.objects.filter(content_type__app_label__in=OWN_APPS)
    assert [one.codename for one in at_least(30, every) if f"`{one.codename}`" not in page] == []


def test_table_of_the_actions_is_that_of_the_declared_actions():
    page = Path(__file__).parents[3].joinpath("docs/reference/permissions.md").read_text()
    declared = [
        f"| {model_admin.opts.verbose_name_plural.capitalize()} | {action.label} | `{name_of(action, model_admin)}` | "
        f"{', '.join(f'`{state}`' for state in action.sources)} | {'yes' if action.is_operation else ''} |"
        for model_admin in PAGES.values()
        if not model_admin.model._meta.proxy  # their actions are among those of all messages
        for action in (*(model_admin.actions or ()), *filter(None, [getattr(model_admin, "adds", None)]))
        if not action.may  # that of another action
    ]
    start = page.index("| page | action |")
    assert page[start : page.index("\n\n", start)].splitlines()[2:] == sorted(declared)
