"""Tasks of `django.tasks` on the outbox and the inbox: enqueued, run, and their results."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from exactly_once.process.clock import monotonic
from exactly_once.sql.days import day_of
from exactly_once.sql.now import DatabaseTime
from inbox.contrib.tasks.compat import TaskResultDoesNotExist, TaskResultStatus, task_backends
from inbox.contrib.tasks.models import Result
from inbox.contrib.tasks.registering import register_queues
from inbox.contrib.tasks.running import CALL
from inbox.contrib.tasks.testing import task_message
from inbox.errors import HandlerTimeout
from inbox.housekeeping import remains
from inbox.models import InboxMessage, Receipt, Step
from inbox.store import claims
from inbox.testing import deliver, travel
from outbox.models import OutboxMessage
from tests.support.apps.effects.models import Effect
from tests.support.apps.tasked import TASKS
from tests.support.apps.tasked.provider import provider
from tests.support.decisions import retry, skip
from tests.support.deliveries import make_due
from tests.support.heartbeats import a_consumer
from tests.support.inbox_rows import delete_messages
from tests.support.relaying import drained
from tests.support.tasks import run_all
from tests.support.threads import InAThread
from tests.support.waiting import A_WHILE, wait_until

READY, RUNNING = TaskResultStatus.READY, TaskResultStatus.RUNNING
FAILED, SUCCESSFUL = TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.every_database]


def refreshed(result):
    result.refresh()
    return result


def run_of(row, *, began):
    """As a heartbeat has it, in seconds since its process has started."""
    return {"what": row.handler, "message": row.message_id, "messages": 1, "thread": "thread-1", "began": began}


def errors_of(result):
    return [error.exception_class for error in result.errors]


def attempts_of_processes_that_die(count, handler):
    drained("local://")
    for _ in range(count):
        claims.claim_due("default", [handler], timedelta(seconds=1))
        travel(timedelta(minutes=2))


class TestEnqueue:
    def test_task_enqueued_outside_a_transaction_is_committed_and_ready(self, tasked):
        result = tasked.note.enqueue("a", detail="b")

        assert OutboxMessage.objects.get().topic == "tasks.default"
        assert (result.status, refreshed(result).status, result.attempts) == (READY, READY, 0)
        assert (result.args, result.kwargs) == (["a"], {"detail": "b"})

    def test_task_enqueued_in_a_transaction_commits_or_rolls_back_with_it(self, tasked):
        with transaction.atomic():
            lost = tasked.note.enqueue("a")
            transaction.set_rollback(True)

        with pytest.raises(TaskResultDoesNotExist):
            tasked.note.get_result(lost.id)
        assert not run_all()


class TestRun:
    def test_effect_result_and_receipt_of_a_task_are_one_commit(self, tasked):
        result = tasked.note.enqueue("a", detail="b")
        run_all()

        assert Effect.objects.get().detail == "b"
        assert refreshed(result).status == SUCCESSFUL
        assert (result.return_value, result.attempts, result.errors) == ({"noted": ["a", "b"]}, 1, [])
        assert result.enqueued_at <= result.started_at <= result.finished_at
        assert tasked.note.get_result(result.id) == result

    @pytest.mark.parametrize("name", ["note_async", "publish_another", "note_unless_taken"])
    def test_task_may_be_async_and_enqueue_others_and_use_savepoints(self, tasked, name):
        result = getattr(tasked, name).enqueue("a")
        run_all()

        assert refreshed(result).status == SUCCESSFUL
        assert Effect.objects.get().name == "a"

    def test_failed_attempt_is_rolled_back_and_the_next_one_sees_its_error(self, tasked):
        result = tasked.note_attempt.enqueue("a")
        run_all()
        between = refreshed(result).status, result.attempts, errors_of(result)
        travel(timedelta(minutes=10))
        run_all()

        assert between == (READY, 1, [ValueError])
        assert refreshed(result).status == SUCCESSFUL
        assert (result.return_value, result.attempts, len(set(result.worker_ids))) == (["builtins.ValueError"], 2, 1)
        assert "the first attempt of a" in result.errors[0].traceback
        assert [*Effect.objects.values_list("detail", flat=True)] == ["2"]

    def test_task_under_a_lease_takes_steps_and_has_a_result(self, tasked):
        result = tasked.charge.enqueue("a")
        run_all()

        assert refreshed(result).return_value == f"charged {result.id}"
        assert provider.asked[result.id] == 1

    def test_task_under_a_lease_may_name_a_step_as_it_likes(self, tasked):
        result = tasked.fail_after_a_step.enqueue("a")
        run_all()
        travel(timedelta(minutes=10))
        run_all()

        assert refreshed(result).status == SUCCESSFUL
        assert (result.return_value, result.attempts) == ("the end of a", 2)

    def test_coroutine_is_cancelled_at_the_timeout_of_its_queue(self, tasked, settings):
        settings.TASKS = {
            "default": {**TASKS["default"], "OPTIONS": {"timeout": timedelta(seconds=0.2), "retry": {"max_attempts": 1}}}
        }
        register_queues()
        result = tasked.sleep.enqueue(2)
        run_all()

        assert (refreshed(result).status, errors_of(result)) == (FAILED, [HandlerTimeout])
        assert tasked.cancelled.pop() == 2

    def test_delayed_task_is_ready_and_not_run_before_its_time(self, tasked):
        result = tasked.note.using(run_after=timezone.now() + timedelta(hours=1)).enqueue("a")
        run_all()
        waiting = refreshed(result).status, Effect.objects.count()
        travel(timedelta(hours=2))
        run_all()

        assert waiting == (READY, 0)
        assert refreshed(result).status == SUCCESSFUL

    def test_task_that_arrives_while_its_result_is_read_has_one(self, tasked):
        result = tasked.note.enqueue("a")
        drained("local://")
        arrived = {model: model.objects.get().pk for model in (Receipt, InboxMessage)}
        for model in arrived:
            model.objects.update(handler="not yet")

        def arrive(execute, sql, *given):
            if "inbox_receipt" in sql and sql.startswith("SELECT"):
                while arrived:
                    model, pk = arrived.popitem()
                    model.objects.filter(pk=pk).update(handler="tasks.default")
            return execute(sql, *given)

        with connection.execute_wrapper(arrive):
            assert refreshed(result).status == READY
        assert not arrived


class TestFailed:
    def test_task_out_of_attempts_has_failed_until_an_operator_retries_it(self, tasked):
        result = tasked.fail.enqueue("a")
        run_all()

        assert (refreshed(result).status, result.attempts, errors_of(result)) == (FAILED, 1, [KeyError])
        with pytest.raises(ValueError, match="failed"):
            _ = result.return_value
        assert not Effect.objects.exists()

        retry("default", InboxMessage.objects.get(state="dead").pk)
        assert refreshed(result).status == READY

    @pytest.mark.parametrize(("name", "kind"), [("return_a_set", "set"), ("return_a_nul", "str")])
    def test_result_that_is_not_json_fails_the_task_with_its_effect(self, tasked, name, kind):
        result = getattr(tasked, name).enqueue()
        run_all()

        assert refreshed(result).status == FAILED
        assert f"returned {kind}, not JSON" in result.errors[0].traceback
        assert not Effect.objects.exists()

    def test_task_that_an_operator_skips_was_cancelled(self, tasked):
        result = tasked.wait.enqueue("a")
        run_all()
        deferred = refreshed(result).status
        skip("default", InboxMessage.objects.get().pk, "not needed")

        assert deferred == READY
        assert refreshed(result).status == FAILED
        assert errors_of(result)[-1].__name__ == "TaskCancelled"

    def test_failed_result_is_written_with_the_death_and_outlives_the_dead_letter(self, tasked):
        result = tasked.fail.enqueue("a")
        run_all()
        row = Result.objects.get()
        died_at = InboxMessage.objects.get(state="dead").settled_at
        delete_messages()
        OutboxMessage.objects.all().delete()

        assert (row.status, row.queue, len(row.worker_ids), row.finished_at) == ("FAILED", "mail", 1, died_at)
        assert (refreshed(result).status, errors_of(result)) == (FAILED, [KeyError])

    def test_task_that_succeeds_after_an_operators_retry_is_successful(self, tasked, monkeypatch):
        result = tasked.charge_in_a_transaction.enqueue("a")
        monkeypatch.setattr(provider, "is_down", True)
        for _ in range(3):
            run_all()
            travel(timedelta(hours=3))
        failed = Result.objects.get().status, refreshed(result).attempts
        monkeypatch.setattr(provider, "is_down", False)
        retry("default", InboxMessage.objects.get(state="dead").pk)
        run_all()

        assert failed == ("FAILED", 3)
        assert Result.objects.get().status == refreshed(result).status == SUCCESSFUL

    @pytest.mark.parametrize("name", ["fail", "reject", "return_a_set"])
    def test_task_that_dies_in_its_first_delivery_from_a_broker_has_failed(self, tasked, name):
        message = task_message(getattr(tasked, name), *([] if name == "return_a_set" else ["a"]))
        deliver(message, raise_errors=False)

        assert Result.objects.get().status == FAILED
        assert task_backends["default"].get_result(message.id).status == FAILED

    def test_times_of_a_failed_task_are_those_at_which_its_attempts_began(self, tasked, monkeypatch):
        def fail_after_a_while(key):
            since = monotonic()
            wait_until(lambda: monotonic() > since + 0.2)
            raise ConnectionError

        monkeypatch.setattr(provider, "charge", fail_after_a_while)
        result = tasked.charge_in_a_transaction.enqueue("a")
        for _ in range(3):
            travel(timedelta(hours=3))
            run_all()

        assert refreshed(result).status == FAILED
        assert result.finished_at - result.last_attempted_at >= timedelta(seconds=0.2)
        assert result.last_attempted_at - result.started_at >= timedelta(seconds=0.4)

    def test_attempt_that_fails_at_its_commit_has_its_times(self, tasked, monkeypatch):
        table = "commits_once"
        deferred = "UNIQUE DEFERRABLE INITIALLY DEFERRED" if connection.vendor == "postgresql" else ""

        def charge(key):
            if not deferred:
                raise IntegrityError
            with connection.cursor() as cursor:
                cursor.execute(f"CREATE TEMPORARY TABLE IF NOT EXISTS {table} (number integer {deferred})")
                cursor.execute(f"INSERT INTO {table} VALUES (1), (1)")

        monkeypatch.setattr(provider, "charge", charge)
        result = tasked.charge_in_a_transaction.enqueue("a")
        run_all()

        assert (refreshed(result).status, errors_of(result)) == (READY, [IntegrityError])
        assert result.started_at == result.last_attempted_at is not None

    def test_heartbeat_of_an_earlier_attempt_is_not_that_of_the_present_one(self, tasked):
        """Its process could not write another one since."""
        result = tasked.note_attempt.enqueue("a")
        run_all()
        row = InboxMessage.objects.get()
        a_consumer(running=[run_of(row, began=0.0)])
        make_due()
        claims.claim_due("default", ["tasks.default"], timedelta(minutes=1))
        stale = refreshed(result).worker_ids[-1]
        a_consumer(running=[run_of(row, began=timedelta(hours=5, seconds=1).total_seconds())])

        assert (result.status, stale) == (RUNNING, "unknown")
        assert refreshed(result).worker_ids[-1].endswith(":thread-1")
        assert result.last_attempted_at > row.failed_at

    def test_workers_of_a_task_whose_processes_died_are_unknown(self, tasked):
        result = tasked.fail.enqueue("a")
        attempts_of_processes_that_die(2, "tasks.mail")
        run_all()

        assert refreshed(result).status == FAILED
        assert (result.worker_ids, result.started_at) == (["unknown"] * 2, None)

    def test_task_under_a_lease_whose_last_process_died_after_its_call_has_succeeded(self, tasked):
        result = tasked.charge.enqueue("a")
        attempts_of_processes_that_die(3, "tasks.payments.leased")
        Step.objects.create(message_id=InboxMessage.objects.get().pk, name=CALL, result="charged a", taken_at=timezone.now())
        run_all()

        assert InboxMessage.objects.get(handler="tasks.payments.leased").state == "dead"
        assert (refreshed(result).status, result.return_value) == (SUCCESSFUL, "charged a")
        assert not provider.asked[result.id]

    def test_first_delivery_from_a_broker_is_running_until_it_commits(self, tasked, settings, monkeypatch):
        """Only its own transaction has a row of it."""
        settings.INBOX = {"BROKER_URL": "memory://"}
        result = tasked.charge_in_a_transaction.enqueue("a")
        sent = OutboxMessage.objects.get()
        OutboxMessage.objects.update(state="published", settled_at=DatabaseTime(), day=day_of("default"))
        charging, go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(provider, "charge", lambda key: charging.set() or go_on.wait(A_WHILE))
        message = replace(task_message(tasked.charge_in_a_transaction, "a"), id=result.id, biz_id=sent.biz_id)

        with InAThread(lambda: deliver(message)):
            assert charging.wait(A_WHILE)
            during = refreshed(result)
            seen = during.status, during.started_at is not None, during.attempts
            go_on.set()

        assert seen == ((RUNNING, True, 1) if connection.vendor == "postgresql" else (READY, False, 0))
        assert refreshed(result).status == SUCCESSFUL

    def test_results_are_deleted_after_their_time_although_their_queue_was_removed(self, tasked, settings):
        tasked.fail.enqueue("a")
        run_all()
        settings.TASKS = {"default": {**TASKS["default"], "QUEUES": ["default"], "OPTIONS": {}}}
        travel(timedelta(days=13))
        before = remains["task results"].count("default")
        travel(timedelta(days=2))

        assert (before, remains["task results"].count("default")) == (0, 1)

    def test_task_has_attempts_of_its_own(self, tasked):
        result = tasked.try_once.enqueue()
        run_all()

        assert (refreshed(result).status, result.attempts) == (FAILED, 1)
