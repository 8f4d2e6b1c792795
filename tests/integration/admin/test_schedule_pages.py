"""Schedules in the admin: when they tick, why one fails, and the operators' decisions."""

from datetime import timedelta
from functools import partial

import pytest
from django.urls import reverse

from exactly_once.models import AuditEntry
from exactly_once.sql.now import DatabaseTime
from outbox import Draft
from outbox.contrib.recurring import recurring
from outbox.contrib.recurring.declarations import declarations
from outbox.contrib.recurring.models import Schedule
from outbox.models import OutboxMessage
from tests.support.admin_pages import Page, act, said, staff_client

pytestmark = pytest.mark.django_db(databases=["default", "other"])

LIST, ONE = (f"admin:outbox_recurring_schedule_{page}" for page in ("changelist", "change"))
VIEW, NAME = "view_schedule", "reports.nightly"
CONFIRMED = {"confirmed": "yes", "reason": "asked by the customer"}

on_the_list = partial(act, page=LIST)


@pytest.fixture
def schedule():
    """A schedule of this process, with a row that a relay has made a day ago."""
    recurring(every=timedelta(hours=7), name=NAME)(lambda tick: Draft(NAME, {"at": tick.at}))
    ago = DatabaseTime(-timedelta(days=1))
    return Schedule.objects.create(name=NAME, recurrence="every 7:00:00", position=ago, due_at=ago)


def test_list_shows_state_ticks_and_why_one_fails(schedule):
    Schedule.objects.create(name="removed", position=DatabaseTime())
    Schedule.objects.filter(name=NAME).update(error="LookupError: no such report", failures=2)
    text = Page(staff_client(VIEW).get(reverse(LIST))).text
    for words in (NAME, "every 7:00:00", "Failing", "LookupError: no such report", "removed", "Not declared"):
        assert words in text
    assert NAME in Page(staff_client(VIEW).get(reverse(ONE, args=[schedule.pk]))).text


def test_operator_pauses_and_resumes_a_schedule(schedule):
    client = staff_client(VIEW, "pause_schedule")
    before = Schedule.objects.get().position
    on_the_list(client, "pause", schedule, **CONFIRMED)
    assert Schedule.objects.get().paused_at
    on_the_list(client, "resume", schedule, **CONFIRMED)
    schedule.refresh_from_db()

    assert schedule.paused_at is None
    assert schedule.position == schedule.due_at > before + timedelta(hours=23)
    assert [entry.action for entry in AuditEntry.objects.order_by("pk")] == ["pause", "resume"]


def test_operator_runs_a_schedule_now(schedule):
    response = on_the_list(staff_client(VIEW, "run_schedule"), "run", schedule, **CONFIRMED)
    assert said(response) == [("success", f"Schedule {NAME}: run")]
    assert OutboxMessage.objects.get().biz_id.startswith(f"{NAME}@")
    assert AuditEntry.objects.get().action == "run"


def test_operator_sees_why_a_run_has_failed_and_nothing_is_written(schedule):
    def function(tick):
        raise LookupError("no such report")

    del declarations[NAME]
    recurring(every=timedelta(hours=7), name=NAME)(function)
    response = on_the_list(staff_client(VIEW, "run_schedule"), "run", schedule, **CONFIRMED)
    assert said(response) == [("error", f"Schedule {NAME}: not run: no such report")]
    assert not AuditEntry.objects.exists()
