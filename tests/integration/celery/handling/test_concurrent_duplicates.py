"""A delivery whose duplicate is running, on PostgreSQL: SQLite has one writer, and there the second waits for the first."""

import pytest
from celery import states

from tests.integration.celery.handling.tracing import deliver
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import InAThread, effects
from tests.support.waiting import wait_until


@pytest.mark.django_db(transaction=True)
def test_duplicate_of_a_running_task_is_sent_again_for_later(a_task, sent):
    go = []

    def wait(order_id):
        Effect.objects.create(name=order_id)
        go.append("begun")
        wait_until(lambda: "go" in go)

    task = a_task(wait, biz_id="order_id", max_retries=0)
    with InAThread(lambda: deliver(task, "o-1", task_id="t-1")) as first:
        wait_until(lambda: go)
        state, reason = deliver(task, "o-1", task_id="t-2", retries=5, inbox_sent_at="2026-01-02T00:00:00+00:00")
        again, _ = deliver(task, "o-1", task_id="t-1", redelivered=True)
        go.append("go")

    assert first.answer[0] == states.SUCCESS
    assert (state, again, str(reason)) == (states.IGNORED, states.IGNORED, "another delivery of its business id is being run")
    copies = sent()
    headers = copies[0].headers
    assert [copy.headers["id"] for copy in copies] == ["t-2", "t-1"]
    assert (headers["retries"], headers["inbox_sent_at"], headers["task"]) == (5, "2026-01-02T00:00:00+00:00", "tests.task")
    assert headers["eta"]
    assert effects() == 1
