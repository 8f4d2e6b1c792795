"""What a backend of `django.tasks` offers: options of tasks and queues, signals, checks, helpers for tests."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from unittest.mock import ANY

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connection, transaction
from django.utils import timezone

from inbox import Ordered
from inbox.contrib.tasks.backend import ExactlyOnceBackend
from inbox.contrib.tasks.checks import problems
from inbox.contrib.tasks.compat import (
    PACKAGE,
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
)
from inbox.contrib.tasks.models import Result
from inbox.contrib.tasks.queues import options_of
from inbox.contrib.tasks.registering import register_queues
from inbox.contrib.tasks.testing import run_tasks, task_message
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.testing import assert_effect_once, travel
from outbox import cancel, publish
from outbox.models import OutboxMessage
from tests.support.apps.effects.models import Effect
from tests.support.apps.tasked import TASKS
from tests.support.decisions import skip
from tests.support.tasks import run_all

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.every_database]

SIGNALS = {"enqueued": task_enqueued, "started": task_started, "finished": task_finished}


class OwnBackend(ExactlyOnceBackend):
    """Of a project."""


def not_importable(name):
    """A function whose path is not that of a task."""


@pytest.fixture
def heard():
    """Connect a receiver of all signals; it records each with the status, then calls the given function."""
    connected, said = [], []

    def connect(act=lambda name: None):
        for name, signal in SIGNALS.items():

            def receive(task_result, name=name, **given):
                said.append((name, str(task_result.status), connection.in_atomic_block))
                act(name)

            signal.connect(receive)
            connected.append((signal, receive))
        return said

    yield connect
    for signal, receive in connected:
        signal.disconnect(receive)


class TestOptions:
    def test_second_task_with_a_biz_id_has_the_result_of_the_first(self, tasked):
        first, second = (tasked.note.using(biz_id=lambda name: f"note-{name}").enqueue("a") for _ in range(2))
        run_all()
        second.refresh()

        assert Effect.objects.count() == 1
        assert (second.status, second.return_value) == (TaskResultStatus.SUCCESSFUL, {"noted": ["a", ""]})
        assert first.id != second.id

    def test_biz_id_of_a_task_can_be_removed(self, tasked):
        named = tasked.note.using(biz_id="one")
        for task in (named, named.using(biz_id=None), named.using(queue_name=None)):
            task.enqueue("a")

        names = [*OutboxMessage.objects.order_by("pk").values_list("biz_id", flat=True)]
        own = "tests.support.apps.tasked.tasks.note:one"
        assert [name == own for name in names] == [True, False, True]

    def test_tasks_of_two_functions_with_one_biz_id_are_both_run(self, tasked):
        for task in (tasked.note, tasked.note_async):
            for name in ("first", "second"):
                task.using(biz_id="order-17").enqueue(name)
        run_all()

        assert [*Effect.objects.values_list("name", flat=True)] == ["first"] * 2

    def test_task_that_is_enqueued_again_for_another_time_is_the_same(self, tasked):
        later = timezone.now() + timedelta(minutes=5)
        for run_after in (later, later + timedelta(minutes=5)):
            result = tasked.note.using(biz_id="one", run_after=run_after).enqueue("a")
        travel(timedelta(hours=1))
        run_all()

        received = InboxMessage.objects.get()
        assert (received.duplicates, received.conflicts) == (1, 0)
        assert tasked.note.get_result(received.message_id).task.run_after == later
        assert tasked.note.get_result(result.id).status == TaskResultStatus.SUCCESSFUL

    def test_second_task_whose_first_has_no_result_any_more_was_cancelled(self, tasked):
        tasked.note.using(biz_id="one").enqueue("a")
        run_all()
        Result.objects.all().delete()
        second = tasked.note.using(biz_id="one").enqueue("a")
        run_all()
        second.refresh()

        assert second.status == TaskResultStatus.FAILED
        assert "An earlier task with its biz-id has ended" in second.errors[0].traceback

    def test_unique_task_that_was_skipped_long_ago_was_cancelled(self, tasked):
        unique = tasked.wait.using(biz_id="one", unique=True)
        unique.enqueue("a")
        run_all()
        skip("default", InboxMessage.objects.get().pk, "not needed")
        InboxMessage.objects.all().delete()

        assert unique.enqueue("a").status == TaskResultStatus.FAILED

    def test_unique_task_is_enqueued_once(self, tasked):
        unique = tasked.note.using(biz_id="one", unique=True)
        first = unique.enqueue("a")
        run_all()

        assert unique.enqueue("a").id == first.id
        assert unique.enqueue("a").status == TaskResultStatus.SUCCESSFUL

    def test_key_is_that_of_the_message(self, tasked):
        tasked.note.using(key=lambda name: f"customer-{name}").enqueue("a")

        assert OutboxMessage.objects.get().key == "customer-a"

    def test_delayed_tasks_that_became_due_in_an_outage_are_sent_in_the_order_in_which_they_were_enqueued(self, tasked):
        times = (timezone.now() + timedelta(minutes=minutes) for minutes in (3, 1, 2))
        sent = [tasked.note.using(run_after=time).enqueue("a").id for time in times]
        travel(timedelta(hours=1))
        run_all()

        assert [*InboxMessage.objects.order_by("pk").values_list("message_id", flat=True)] == sent

    def test_cancelled_task_has_failed_and_says_so(self, tasked):
        result = tasked.note.enqueue("a")
        cancel(result.id)
        result.refresh()

        assert result.status == TaskResultStatus.FAILED
        assert result.errors[0].exception_class.__name__ == "TaskCancelled"

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"priority": 10}, "priority"),
            ({"queue_name": "nobody"}, "nobody"),
            ({"unique": True}, "needs a biz_id"),
            ({"biz_id": 17}, "biz_id is 17: it must be text"),
            ({"lease": "yes"}, "lease is 'yes'"),
        ],
    )
    def test_task_that_the_backend_cannot_run_is_invalid(self, tasked, changes, why):
        with pytest.raises(InvalidTask, match=why):
            tasked.note.using(**changes)

    @pytest.mark.parametrize(
        ("given", "why"),
        [
            ({"retries": 3}, "unknown option 'retries'"),
            ({"retry": {"max_attempts": 0}}, "max_attempts is 0"),
            ({"queues": ["mail"]}, "queues is"),
        ],
    )
    def test_wrong_options_are_refused_with_the_name_of_the_backend(self, given, why):
        with pytest.raises(ImproperlyConfigured, match=rf"TASKS\['mail'\]\['OPTIONS'\].*{why}"):
            options_of("mail", given)

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"run_after": datetime(2030, 1, 1)}, "aware"),  # noqa: DTZ001 - naive
            ({"func": lambda: None}, "module level|cannot be imported"),
            ({"func": not_importable}, "tests.integration.tasks.test_backend.not_importable"),
            ({"takes_context": True}, "context"),
        ],
    )
    def test_task_that_django_would_refuse_is_refused(self, tasked, changes, why):
        with pytest.raises(InvalidTask, match=why):
            replace(tasked.note, **changes).enqueue("a")

        assert not OutboxMessage.objects.exists()

    def test_unknown_and_foreign_ids_have_no_result(self, tasked):
        with transaction.atomic():
            other = publish("shop.order.placed", {})

        for result_id in (str(other.id), "nonsense"):
            with pytest.raises(TaskResultDoesNotExist):
                tasked.note.get_result(result_id)


class TestDamage:
    def test_function_that_a_worker_does_not_have_is_a_failed_attempt(self, tasked, monkeypatch):
        result = tasked.note.enqueue("a")
        monkeypatch.delattr(tasked, "note")
        run_all()
        result.refresh()

        assert result.status == TaskResultStatus.READY
        assert "cannot be imported" in result.errors[0].traceback

    def test_task_whose_lease_was_removed_runs_and_has_a_result(self, tasked, settings):
        result = tasked.charge.enqueue("a")
        settings.TASKS = {"default": {**TASKS["default"], "OPTIONS": {}}}
        run_all()

        assert task_backends["default"].get_result(result.id).status == TaskResultStatus.SUCCESSFUL

    def test_task_whose_backend_was_renamed_runs_and_has_a_result(self, tasked):
        result = tasked.note_attempt.enqueue("a")
        sent = OutboxMessage.objects.get()
        OutboxMessage.objects.update(body=bytes(sent.body).replace(b'"default"', b'"renamed"'))
        run_all()
        travel(timedelta(minutes=10))
        run_all()

        assert task_backends["default"].get_result(result.id).status == TaskResultStatus.SUCCESSFUL

    def test_message_that_is_not_the_call_of_a_task_is_a_dead_letter(self, tasked):
        with transaction.atomic():
            publish("tasks.default", {"order": 17})
        run_all()

        dead = InboxMessage.objects.get(state="dead")
        assert "not the call of a task" in dead.last_error
        assert not Result.objects.exists()
        with pytest.raises(TaskResultDoesNotExist):
            tasked.note.get_result(dead.message_id)


class TestSignals:
    def test_each_signal_is_sent_with_the_status_and_the_last_one_after_the_commit(self, tasked, heard):
        said = heard()
        with transaction.atomic():
            tasked.note.enqueue("a")
            before = [*said]
        run_all()

        assert before == []
        assert said == [("enqueued", "READY", False), ("started", "RUNNING", ANY), ("finished", "SUCCESSFUL", False)]

    def test_rerun_is_announced_again_and_a_failed_task_once(self, tasked, heard):
        said = heard()
        tasked.fail.enqueue("a")
        run_all()

        assert [name for name, *_ in said] == ["enqueued", "started", "finished"]
        assert said[-1] == ("finished", "FAILED", False)

    @pytest.mark.parametrize("caught", [False, True])
    @pytest.mark.parametrize("fault", ["an error", "a statement", "a model"])
    def test_receiver_that_fails_changes_nothing(self, tasked, heard, fault, caught):
        taken = Effect.objects.create(name="taken")

        def fail():
            if fault == "a model":
                Effect.objects.create(pk=taken.pk, name="receiver")
            elif fault == "a statement":
                with connection.cursor() as cursor:
                    cursor.execute("SELECT * FROM nowhere")
            raise ValueError(fault)

        def act(name):
            Effect.objects.create(name="receiver")
            with suppress(DatabaseError, ValueError) if caught else nullcontext():
                fail()

        heard(act)
        result = tasked.note.enqueue("a")
        run_all()
        result.refresh()

        assert (result.status, result.attempts) == (TaskResultStatus.SUCCESSFUL, 1)
        assert Effect.objects.filter(name="a").count() == 1


class TestChecks:
    def test_backend_of_the_tests_has_no_problems(self, tasked):
        assert not [*task_backends["default"].check()]

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"QUEUES": []}, "inbox_tasks.E002"),
            ({"QUEUES": ["default"]}, "inbox_tasks.E002"),  # OPTIONS for others
            ({"QUEUES": ["default", "mail", "payments", "mail.leased"]}, "inbox_tasks.E002"),
            ({"QUEUES": ["default", "mail", "payments", "*"]}, "inbox_tasks.E002"),
            ({"OPTIONS": {"keep_results": "7d"}}, "inbox_tasks.E004"),
            ({"OPTIONS": {"using": "nowhere"}}, "inbox_tasks.E005"),
        ],
    )
    def test_queues_that_cannot_be_used_are_reported(self, tasked, settings, changes, problem):
        settings.TASKS = {**TASKS, "default": {**TASKS["default"], **changes}}

        assert {one.id for one in problems(task_backends["default"])} == {problem}

    def test_project_with_a_queue_that_no_handler_can_have_starts_so_that_the_check_can_report_it(self, tasked, settings):
        settings.TASKS = {"default": {**TASKS["default"], "QUEUES": ["*"], "OPTIONS": {}}}

        register_queues()

    def test_queue_of_two_backends_is_reported(self, tasked, settings):
        settings.TASKS = {**TASKS, "second": {"BACKEND": "inbox.tasks.ExactlyOnceBackend", "QUEUES": ["mail"]}}

        assert [one.id for one in problems(task_backends["second"])] == ["inbox_tasks.E003"]

    def test_queue_of_two_backends_of_which_one_is_a_subclass_is_reported(self, tasked, settings):
        settings.TASKS = {**TASKS, "second": {"BACKEND": f"{__name__}.OwnBackend", "QUEUES": ["mail"]}}

        assert [one.id for one in problems(task_backends["second"])] == ["inbox_tasks.E003"]

    def test_backend_of_another_class_with_the_same_queue_does_not_hide_a_problem(self, tasked, settings):
        other = {"BACKEND": f"{PACKAGE}.backends.immediate.ImmediateBackend", "QUEUES": ["mail.leased"]}
        settings.TASKS = {"another": other, "default": {**TASKS["default"], "QUEUES": ["mail.leased"], "OPTIONS": {}}}

        assert [one.id for one in problems(task_backends["default"])] == ["inbox_tasks.E002"]

    def test_missing_app_is_reported(self):
        """In a process of its own, which has not imported the models of that app."""
        script = (
            "import django; from django.conf import settings; from django.core.management import call_command; "
            f"settings.configure(INSTALLED_APPS={['django_tasks', 'exactly_once', 'outbox', 'inbox']!r}, "
            "DATABASES={'default': {'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}}, SECRET_KEY='a', "
            "TASKS={'default': {'BACKEND': 'inbox.tasks.ExactlyOnceBackend'}}); django.setup(); call_command('check')"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

        assert "inbox_tasks.E001" in done.stderr

    def test_queues_are_handlers_with_the_options_of_the_queue(self, tasked):
        assert registry.get("tasks.payments.leased").lease
        register_queues()  # once more changes nothing

    @pytest.mark.parametrize("ordered", [True, {"on_dead": "skip"}])
    def test_queue_may_run_the_tasks_of_a_key_in_order(self, tasked, settings, ordered):
        settings.TASKS = {"default": {**TASKS["default"], "OPTIONS": {"ordered": ordered}}}
        register_queues()

        assert registry.get("tasks.default").ordered == (Ordered() if ordered is True else Ordered(on_dead="skip"))


class TestHelpers:
    def test_run_tasks_returns_what_has_ended_and_raises_what_a_task_raised(self, tasked):
        note = tasked.note.enqueue("a")
        assert run_tasks() == [note.id]

        tasked.fail.enqueue("b")
        with pytest.raises(KeyError):
            run_tasks()

    def test_effect_of_a_task_happens_once_at_whichever_step_its_process_dies(self, tasked):
        assert_effect_once("tasks.default", task_message(tasked.note, "a"), effect=Effect.objects.count)
