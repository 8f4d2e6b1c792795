"""Actions of the admin in a real browser: pausing, the audit log, failure groups, and running processes."""

import pytest

import inbox.models
from inbox.models import ConsumerHeartbeat, FailureNote, InboxMessage, Operation, PausedHandler
from outbox.database.now import DatabaseTime
from outbox.models import OutboxMessage, PausedTopic, RelayHeartbeat
from outbox.states import State
from tests.support.admin_pages import NASTY
from tests.support.apps.worker import JOB
from tests.support.browser import DESKTOP, PHONE
from tests.support.layout import faults
from tests.support.relaying import published
from tests.support.shop_day import AMOUNT, CHARGE, PLACED, TEXT, failing
from tests.support.waiting import wait_until
from tests.support.workers import Process

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.proof]

PROCESSES = {"inbox_consumerheartbeat": ConsumerHeartbeat, "outbox_relayheartbeat": RelayHeartbeat}
WORDS = {"reason": "asked by the customer", "delay": "30m", "payload": '{"amount": 12.5}'}
"""What is filled into the fields of the confirmation pages."""


def require_good_layout(page):
    for size in (PHONE, DESKTOP):
        page.set_viewport_size(size)
        assert not faults(page), (page.url, size)
    assert not page.locator("img[src='x']").count(), page.url


def choose(page, row, action):
    """Check the row in the list, choose the action, and confirm it as often as it asks."""
    page.locator(f"input.action-select[value='{row.pk}']").check()
    page.locator("select[name=action]").select_option(action)
    page.get_by_role("button", name="Go").click()
    page.wait_for_load_state()
    for _ in range(3):  # a correction shows its changes first
        if not page.locator("input[name=confirmed]").count():
            return
        require_good_layout(page)
        for name, value in WORDS.items():
            for field in page.locator(f"form [name={name}]:visible").all():
                field.fill(value)
        page.locator("form input[type=submit]").click()
        page.wait_for_load_state()


def test_topic_and_handler_are_paused_by_a_form(operator, handles):
    handles(print, name=TEXT, topic=PLACED)
    for name, field, value, model in (
        ("outbox_pausedtopic", "topic", "shop.order.placed", PausedTopic),
        ("inbox_pausedhandler", "handler", TEXT, PausedHandler),
    ):
        page = operator.visit(f"admin:{name}_changelist")
        page.locator(".object-tools .addlink").click()
        entry = page.locator(f"[name={field}]")
        if entry.evaluate("field => field.tagName") == "SELECT":
            entry.select_option(value)
        else:
            entry.fill(value)
        page.locator("[name=reason]").fill(NASTY)
        require_good_layout(page)
        page.locator("[name=_save]").click()
        page.locator(".messagelist .success").wait_for()
        require_good_layout(page)
        assert model.objects.get(**{field: value}).paused_by == "operator in the admin"


def test_audit_log_is_filtered_and_exported(operator):
    for actor in ("ada", NASTY):
        inbox.models.AuditEntry.objects.create(
            at=DatabaseTime(), actor=actor, place="admin", address="203.0.113.7", action="retry", kind="message", name=NASTY
        )
    page = operator.visit("admin:inbox_auditentry_changelist")
    page.locator("#changelist-filter summary", has_text="who").first.wait_for()
    page.locator("#changelist-filter a", has_text="ada").click()
    page.wait_for_url("**actor=ada**")
    assert page.locator("#result_list tbody tr").count() == 1
    with page.expect_download() as download:
        page.get_by_role("link", name="Export CSV").click()
    assert len(download.value.path().read_text().splitlines()) == 2


def test_failure_group_takes_a_note_and_its_operation_is_cancelled(operator):
    for number in range(12):
        failing(CHARGE, f"order-{number}", (NASTY, NASTY, NASTY), dead=True)
    page = operator.visit("admin:inbox_failurenote_changelist")
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
    page.get_by_text("The operation ends after its current batch.").wait_for()
    assert Operation.objects.get().cancelled_by == "operator"
    assert all("csrfmiddlewaretoken=" in body for _path, body in operator.posted)


def until_state(operator, name, state):
    """Reload the list, which shows the last heartbeat, until its only process is in this state."""

    def shown():
        page = operator.visit(f"admin:{name}_changelist")
        return page.locator(".field-state", has_text=state).count()

    wait_until(shown)


def test_running_processes_execute_an_operation_and_follow_requests(operator, environment, tmp_path):
    for number in range(12):
        body = b'{"do": "what it cannot"}' if number == 0 else b'{"do": "work"}'
        failing("testworker.work", f"order-{number}", ("ValueError", AMOUNT[1], "no"), dead=True, topic=JOB, body=body)
    page = operator.visit("admin:inbox_failurenote_changelist")
    page.locator(".message-group a").click()
    page.get_by_role("button", name="Retry").click()
    require_good_layout(page)
    page.locator("form input[type=submit]").click()
    page.get_by_text("The operation is planned.").wait_for()

    consumer = Process(environment, tmp_path / "consumer.log", "inbox_consume")
    relay = Process(environment, tmp_path / "relay.log", "outbox_relay")
    with consumer, relay:
        # The page refreshes itself.
        page.locator(".message-state-done", has_text="Finished").wait_for()
        consumer.until(lambda: InboxMessage.objects.filter(state="done").count() == 11)
        assert Operation.objects.get().done == 12
        published(topic=JOB, payload={})
        relay.until(lambda: not OutboxMessage.objects.filter(state=State.READY).exists())

        for action, before, after in (("pause", "Working", "Paused"), ("resume", "Paused", "Working")):
            for name, model in PROCESSES.items():
                until_state(operator, name, before)
                choose(operator.page, model.objects.get(), action)
            for name in PROCESSES:
                until_state(operator, name, after)
                require_good_layout(operator.page)
        for (name, model), action, process in zip(PROCESSES.items(), ("drain", "stop"), (consumer, relay), strict=True):
            page = operator.visit(f"admin:{name}_changelist")
            choose(page, model.objects.get(), action)
            assert process.ends() == 0
            until_state(operator, name, "Stopped")
