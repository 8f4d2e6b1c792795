"""Every action of the admin in a real browser: the pages on the way, the posted forms, the audit log, and running processes."""

from pathlib import Path

import pytest

from exactly_once.models import AuditEntry, FailureNote, Operation
from exactly_once.models import Process as ProcessRow
from inbox.contrib.joins.models import Run
from inbox.models import InboxMessage
from outbox.models import OutboxMessage
from outbox.states import State
from tests.support.admin_actions import ACTIONS, TEXTS, rows_to_act_on
from tests.support.admin_pages import NASTY
from tests.support.apps.worker import JOB
from tests.support.browser import DESKTOP, PHONE
from tests.support.joins import report
from tests.support.layout import faults
from tests.support.relaying import published
from tests.support.shop_day import AMOUNT, CHARGE, PLACED, failing
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

PROCESSES = {"inbox": "consumer", "outbox": "relay"}


def require_good_layout(page):
    for size in (PHONE, DESKTOP):
        page.set_viewport_size(size)
        assert not faults(page), (page.url, size)
    assert not page.locator("img[src='x']").count(), page.url


def choose(page, row, action):
    """Check the row in the list, choose the action, and confirm it as often as it asks."""
    page.locator(f"input.action-select[value='{row.pk}']").check()
    page.locator("select[name=action]").select_option(action)
    page.locator("button[name=index]").first.click()  # "Go", from Django 6.0 on "Run"
    page.wait_for_load_state()
    for _ in range(3):  # a correction shows its changes first
        if not page.locator("input[name=confirmed]").count():
            return
        require_good_layout(page)
        for name, value in TEXTS.items():
            for field in page.locator(f"form [name={name}]:visible").all():
                field.fill(value)
        page.locator("form input[type=submit]").click()
        page.wait_for_load_state()


@pytest.mark.timeout(400)
def test_every_action_is_confirmed_posted_with_csrf_and_logged(operator, handles, joins, tasked):
    handles(lambda message: None, name=CHARGE, topic=PLACED)
    joins(report)
    makers = rows_to_act_on()
    assert set(makers) == set(ACTIONS)

    for (label, action), make in makers.items():
        row = make()
        app, model = label.lower().split(".")
        page = operator.visit(f"admin:{app}_{model}_changelist")
        logged, posted = AuditEntry.objects.count(), len(operator.posted)
        if action == "export":
            with page.expect_download() as download:
                choose(page, row, action)
            assert str(row.message_id) in Path(download.value.path()).read_text()
        else:
            choose(page, row, action)
        if action == "dry_run":
            page.get_by_text("The message is as it was.").wait_for()
            assert InboxMessage.objects.get(pk=row.pk).state == "dead"
        elif action != "export":
            page.locator(".messagelist .success").wait_for()
        assert AuditEntry.objects.filter(action=action).exists(), (label, action)
        assert AuditEntry.objects.count() == logged + 1, (label, action)
        assert len(operator.posted) > posted
        if not isinstance(row, (OutboxMessage, InboxMessage, Run)):
            row.delete()  # the next one has the same name

    assert all("csrfmiddlewaretoken=" in body for _path, body in operator.posted)


def test_failure_group_takes_a_note_and_its_operation_is_cancelled(operator):
    for number in range(12):
        failing(CHARGE, f"order-{number}", (NASTY, NASTY, NASTY), dead=True)
    page = operator.visit("admin:exactly_once_failurenote_changelist")
    page.locator(".message-group a").click()
    page.locator("[name=note]").fill(NASTY)
    page.get_by_role("button", name="Save the note").click()
    page.locator(".message-written", has_text="<script>").wait_for()
    require_good_layout(page)
    assert FailureNote.objects.get().note == NASTY

    page.get_by_role("button", name="Skip").click()
    page.get_by_text("It applies to 12 of 12 messages.").wait_for()
    page.locator("[name=reason]").fill(NASTY)
    require_good_layout(page)
    page.locator("form input[type=submit]").click()
    page.get_by_text("The operation is planned.").wait_for()
    page.get_by_role("button", name="Cancel the operation").click()
    page.get_by_text("ends after its current batch").wait_for()
    assert Operation.objects.get().cancelled_by == "operator"
    assert all("csrfmiddlewaretoken=" in body for _path, body in operator.posted)


def until_state(operator, kind, state):
    """Reload the list, which shows the last heartbeat, until the only process of this kind is in this state."""

    def shown():
        page = operator.visit("admin:exactly_once_process_changelist")
        return page.locator("#result_list tr", has_text=kind).locator(".field-state", has_text=state).count()

    wait_until(shown)


def test_running_processes_execute_an_operation_and_follow_requests(operator, both):
    for number in range(12):
        body = b'{"do": "what it cannot"}' if number == 0 else b'{"do": "work"}'
        failing("worker.work", f"order-{number}", ("ValueError", AMOUNT[1], "no"), dead=True, topic=JOB, body=body)
    page = operator.visit("admin:exactly_once_failurenote_changelist")
    page.locator(".message-group a").click()
    page.get_by_role("button", name="Retry").click()
    require_good_layout(page)
    page.locator("form input[type=submit]").click()
    page.get_by_text("The operation is planned.").wait_for()

    consumer, relay = both
    with consumer, relay:
        # The page refreshes itself.
        page.locator(".message-state-done", has_text="Finished").wait_for()
        consumer.until(lambda: InboxMessage.objects.filter(state="done").count() == 11)
        assert Operation.objects.get().done == 12
        published(topic=JOB, payload={})
        relay.until(lambda: not OutboxMessage.objects.filter(state=State.READY).exists())

        for action, before, after in (("pause", "Working", "Paused"), ("resume", "Paused", "Working")):
            for app, kind in PROCESSES.items():
                until_state(operator, kind, before)
                choose(operator.page, ProcessRow.objects.get(app=app), action)
            for kind in PROCESSES.values():
                until_state(operator, kind, after)
                require_good_layout(operator.page)
        for (app, kind), action, process in zip(PROCESSES.items(), ("drain", "stop"), (consumer, relay), strict=True):
            page = operator.visit("admin:exactly_once_process_changelist")
            choose(page, ProcessRow.objects.get(app=app), action)
            assert process.ends() == 0
            until_state(operator, kind, "Stopped")
