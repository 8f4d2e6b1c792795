"""The results of tasks in the admin, and the way from there to the tasks that have not ended."""

from functools import partial

import pytest
from django.urls import reverse

from inbox.contrib.tasks import admin as tasks_admin
from inbox.contrib.tasks.models import Result
from inbox.models import InboxMessage
from tests.support.admin_pages import Page, act, listed, said, staff_client
from tests.support.tasks import run_all

pytestmark = pytest.mark.django_db(databases=["default", "other"])

LIST, ONE = (f"admin:inbox_tasks_result_{page}" for page in ("changelist", "change"))
TOPICS = "admin:exactly_once_topicsandhandlers_changelist"
VIEW = "view_result"
RETRIED = {"confirmed": "yes", "reason": ""}
DUPLICATE = """Traceback (most recent call last):
  File "shop/tasks.py", line 7, in close_day
    Day.objects.create(date=date)
django.db.utils.IntegrityError: duplicate key value violates unique constraint "day"
DETAIL:  Key (date)=(2026-11-30) already exists.
"""
TIMEOUT = "TimeoutError: no answer within 10 s"
ERRORS = [
    {"exception_class_path": "builtins.TimeoutError", "traceback": TIMEOUT},
    {"exception_class_path": "django.db.utils.IntegrityError", "traceback": DUPLICATE},
]

on_the_list = partial(act, page=LIST)


def failed(tasked):
    tasked.fail.enqueue("a")
    run_all()
    return Result.objects.get(status="FAILED")


def test_list_is_filtered_by_state(tasked):
    row = failed(tasked)
    tasked.note.enqueue("b")
    run_all()

    client = staff_client(VIEW)
    assert len(listed(client, LIST)) == 2
    assert listed(client, LIST, status="FAILED") == [row.pk]


def test_failed_task_has_its_workers_the_line_that_names_the_exception_and_its_latest_traceback_unfolded(tasked):
    row = failed(tasked)
    Result.objects.update(errors=ERRORS, worker_ids=["shop-worker-1:902", "shop-worker-2:17"])

    client = staff_client(VIEW)
    in_the_list, page = Page(client.get(reverse(LIST))), Page(client.get(reverse(ONE, args=[row.pk])))

    named = 'django.db.utils.IntegrityError: duplicate key value violates unique constraint "day"'
    assert named in in_the_list.text
    assert "DETAIL" not in in_the_list.text
    for words in (named, "DETAIL", "shop-worker-1:902", "shop-worker-2:17"):
        assert words in page.text
    assert page.text.index("DETAIL") < page.text.index(TIMEOUT)
    assert "return value" not in page.text.lower()
    (folded,) = page.all("details", **{"class": "message-block message-folded"})
    assert "open" not in folded


def test_retried_task_has_no_result_until_it_ends_again(tasked):
    row = failed(tasked)
    response = on_the_list(staff_client(VIEW, "retry_result"), "retry", row, **RETRIED)

    assert [level for level, _words in said(response)] == ["success"]
    assert not Result.objects.exists()
    run_all()
    assert Result.objects.get().message_id == row.message_id


def test_result_that_is_deleted_meanwhile_is_left_out(tasked):
    assert tasks_admin.retry("default", 1, by="anna") == "it no longer exists"
    assert not tasks_admin.enqueue_again("default", 1)


def test_task_in_quarantine_is_not_retried_and_the_operator_sees_why(tasked):
    row = failed(tasked)
    InboxMessage.objects.filter(message_id=row.message_id).update(quarantined=True)
    ((level, words),) = said(on_the_list(staff_client(VIEW, "retry_result"), "retry", row, **RETRIED))

    assert level == "warning"
    assert "use “Retry past the maximum message age…”" in words


def test_exception_group_is_named_by_its_own_line():
    traceback = "  + Exception Group Traceback:\n  | ExceptionGroup: two (2 sub-exceptions)\n  +-+------ 1 ------\n"
    error = {"exception_class_path": "builtins.ExceptionGroup", "traceback": traceback}
    assert tasks_admin._raised(error) == "ExceptionGroup: two (2 sub-exceptions)"


def test_task_without_a_dead_letter_keeps_its_result_and_the_operator_sees_why(tasked):
    tasked.note.enqueue("b")
    run_all()
    row = Result.objects.get()
    ((level, words),) = said(on_the_list(staff_client(VIEW, "retry_result"), "retry", row, **RETRIED))

    assert level == "warning"
    assert words.endswith("not retried: its message is not a dead letter")
    assert Result.objects.exists()


def test_list_leads_to_the_topics_and_handlers_of_queues_for_those_who_may_view_them(tasked):
    address = f"{reverse(TOPICS)}?prefix=tasks."
    assert Page(staff_client(VIEW, "view_topicsandhandlers").get(reverse(LIST))).all("a", href=address)
    assert not Page(staff_client(VIEW).get(reverse(LIST))).all("a", href=address)
