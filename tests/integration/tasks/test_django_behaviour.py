"""What Django's tests of `django.tasks` demand of a backend, and those of django-tasks and django-tasks-db, of this backend.

The sources are tests/tasks of Django 6.1, tests/tests of django-tasks and tests/tests.py of django-tasks-db. What the modules
beside this one test is not repeated. Not applicable:

- `results` and `clear()` of the dummy backend; that the immediate backend runs a task in `enqueue()`, raises its
  KeyboardInterrupt and has no results to get. A task that raises KeyboardInterrupt here has failed, as in django-tasks-db.
- Custom backends (abstract methods, `supports_async_task = False`) and `TaskError.exception_class`: they test Django.
- Priorities, see decisions/0054; an empty `QUEUES`, which is inbox_tasks.E002; `USE_TZ = False`, which is exactly_once.E002.
- Models, row locks, numbers of queries, ids, the admin, worker and pruning commands of django-tasks-db. Their counterparts:
  tests/crash for killed and concurrent workers, tests/integration/stored for claims, tests/contracts for retention.

Some demands are met in another form:

- `enqueued_at` of what `enqueue()` returns is by the clock of the process, after `refresh()` by that of the database.
- A return value that is not JSON is a `ResultNotJson`, which is a TypeError.
- The line that Django logs for a failed task has no traceback, because the task has failed in an earlier transaction. The
  inbox logs the error of each attempt.
- Delayed tasks run at their time. Those that became due while no process ran are run in the order in which they were enqueued.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import pickle
import uuid
from collections import Counter
from datetime import timedelta
from importlib import import_module

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from inbox.contrib.tasks.backend import ExactlyOnceBackend
from inbox.contrib.tasks.compat import (
    PACKAGE,
    InvalidTask,
    Task,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
)
from inbox.contrib.tasks.task import ExactlyOnceTask
from inbox.contrib.tasks.testing import run_tasks
from inbox.housekeeping import remains
from inbox.testing import travel
from outbox.models import OutboxMessage
from outbox.testing import run_relay
from tests.support.apps.effects.models import Effect
from tests.support.apps.tasked import TASKS
from tests.support.threads import InAThread

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.every_database]

django_tasks = import_module(PACKAGE)
READY, RUNNING = TaskResultStatus.READY, TaskResultStatus.RUNNING
FAILED, SUCCESSFUL = TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL
TIMES = ("enqueued_at", "started_at", "last_attempted_at", "finished_at")


@pytest.fixture(params=["", "a"], ids=["sync", "async"])
def call(request):
    """Calls a method of this name, or the asynchronous one beside it."""

    def call(owner, name, *args, **kwargs):
        method = getattr(owner, f"{request.param}{name}")
        return (async_to_sync(method) if request.param else method)(*args, **kwargs)

    return call


@pytest.fixture
def heard():
    """What each signal was sent with: the name of the signal, the sender and the result."""
    said, connected = [], []
    for name, signal in {"enqueued": task_enqueued, "started": task_started, "finished": task_finished}.items():

        def receive(sender, task_result, name=name, **given):
            said.append((name, sender, task_result))

        signal.connect(receive)
        connected.append((signal, receive))
    yield said
    for signal, receive in connected:
        signal.disconnect(receive)


def run_due():
    """Relay and run all that is due, in this thread; failures are stored, not raised."""
    return run_relay(raise_errors=False, reproducible=True)


def assert_in_order(result):
    """All instants are known, and each is not before the one before it."""
    times = [getattr(result, name) for name in TIMES]
    assert None not in times
    assert times == sorted(times)


class TestTask:
    @pytest.mark.parametrize("name", ["note", "note_async"])
    @pytest.mark.parametrize("decorate", [django_tasks.task, django_tasks.task()], ids=["bare", "called"])
    def test_decorator_makes_a_task_of_this_backend(self, tasked, decorate, name):
        made = decorate(getattr(tasked, name).func)

        assert type(made) is ExactlyOnceTask
        assert made == getattr(tasked, name)
        assert (made.name, made.module_path) == (name, f"tests.support.apps.tasked.tasks.{name}")
        assert import_string(made.module_path) is getattr(tasked, name)

    @pytest.mark.skipif(
        "kwargs" not in inspect.signature(django_tasks.task).parameters, reason="Django 6.0 does not pass them on"
    )
    def test_decorator_takes_options_of_django_and_of_this_backend(self, tasked):
        made = django_tasks.task(queue_name="mail", key="customer-17")(tasked.note.func)

        assert (made.queue_name, made.key) == ("mail", "customer-17")
        assert (made.biz_id, made.takes_context, made.run_after) == (None, False, None)

    @pytest.mark.parametrize("unknown", [{"retries": 3}, {"run_after": timezone.now()}], ids=["retries", "run_after"])
    def test_decorator_refuses_what_no_task_has_and_a_time(self, tasked, unknown):
        with pytest.raises(TypeError):
            django_tasks.task(**unknown)(tasked.note.func)

    def test_function_that_is_not_of_a_module_is_refused(self, tasked):
        for function in (any, self.test_function_that_is_not_of_a_module_is_refused):
            with pytest.raises(InvalidTask, match="module level"):
                django_tasks.task(function)

    def test_using_makes_changed_copies_that_can_be_changed_again(self, tasked):
        later = timezone.now() + timedelta(hours=1)
        copy = tasked.note.using()
        changed = tasked.note.using(run_after=later).using(queue_name="mail", priority=0)

        assert copy == tasked.note
        assert copy is not tasked.note
        assert (changed.run_after, changed.queue_name) == (later, "mail")
        assert (tasked.note.run_after, tasked.note.queue_name) == (None, "default")

    @pytest.mark.parametrize("priority", [-101, 101, 3.1, 1])
    def test_every_priority_but_the_default_is_refused(self, tasked, priority):
        with pytest.raises(InvalidTask, match="priority"):
            tasked.note.using(priority=priority)

    def test_backend_is_that_of_the_settings(self, tasked):
        backend = task_backends["default"]

        assert django_tasks.default_task_backend == tasked.note.get_backend() == backend
        assert (type(backend), backend.alias, backend.options) == (ExactlyOnceBackend, "default", TASKS["default"]["OPTIONS"])

    def test_task_may_be_enqueued_on_another_backend(self, tasked):
        result = tasked.note.using(backend="immediate").enqueue("a")

        assert (result.backend, result.status) == ("immediate", SUCCESSFUL)
        assert not OutboxMessage.objects.exists()

    @pytest.mark.parametrize(
        ("alias", "why"), [("unknown", "connection 'unknown' doesn't exist"), ("missing", "find backend 'does.not.exist'")]
    )
    def test_backend_that_does_not_exist_is_refused(self, tasked, settings, alias, why):
        settings.TASKS = {**TASKS, "missing": {"BACKEND": "does.not.exist"}}

        with pytest.raises(ImproperlyConfigured, match=why):
            tasked.note.using(backend=alias)

    def test_task_without_backends_cannot_be_enqueued(self, tasked, settings):
        settings.TASKS = {}

        with pytest.raises(ImproperlyConfigured):
            tasked.note.enqueue("a")

    @pytest.mark.parametrize("name", ["note", "note_async"])
    def test_call_runs_the_function_here(self, tasked, call, name):
        assert call(getattr(tasked, name), "call", "a")
        assert Effect.objects.get().name == "a"

    @pytest.mark.skipif(not hasattr(Task, "_reconstruct"), reason="no task can be pickled before Django 6.1")
    def test_task_and_result_can_be_pickled(self, tasked):
        given = tasked.note.using(key="customer-17")
        result = given.enqueue("a")

        assert pickle.loads(pickle.dumps(given)) == given
        assert pickle.loads(pickle.dumps(result)) == result
        with pytest.raises(ValueError, match="point to a Task"):
            ExactlyOnceTask._reconstruct({"func": "builtins.any"})


class TestEnqueue:
    @pytest.mark.parametrize("name", ["note", "note_async"])
    def test_result_is_ready_and_has_no_value(self, tasked, call, heard, name):
        task = getattr(tasked, name)
        result = call(task, "enqueue", 1, detail=("b",))

        assert (result.status, result.is_finished, result.attempts, result.errors) == (READY, False, 0, [])
        assert (result.task, result.backend, result.args, result.kwargs) == (task, "default", [1], {"detail": ["b"]})
        assert [getattr(result, name) for name in TIMES[1:]] == [None] * 3
        with pytest.raises(ValueError, match="not finished yet"):
            _ = result.return_value
        assert heard == [("enqueued", ExactlyOnceBackend, result)]

    def test_arguments_that_are_not_json_are_refused(self, tasked, call):
        with pytest.raises(TypeError, match="Unsupported type"):
            call(tasked.note, "enqueue", timezone.now())

        assert not OutboxMessage.objects.exists()

    def test_task_is_validated_when_it_is_enqueued(self, tasked, settings, call):
        mail = tasked.note.using(queue_name="mail")
        settings.TASKS = {"default": {**TASKS["default"], "QUEUES": ["default"], "OPTIONS": {}}}

        with pytest.raises(InvalidTask, match="Queue 'mail' is not valid"):
            call(mail, "enqueue", "a")

    def test_result_exists_before_the_commit(self, tasked):
        with transaction.atomic():
            result = tasked.note.enqueue("a")
            found = tasked.note.get_result(result.id)

        assert (result.enqueued_at is not None, found.status) == (True, READY)


class TestResult:
    def test_result_of_a_task_that_waits_is_the_one_that_was_returned(self, tasked, call):
        later = timezone.now() + timedelta(hours=1)
        result = call(task_backends["default"], "enqueue", tasked.note.using(queue_name="mail", run_after=later), ("a",), {})
        found = call(task_backends["default"], "get_result", result.id)

        assert found.task == result.task
        # `enqueue` does not read the clock of the database.
        assert found == dataclasses.replace(result, enqueued_at=found.enqueued_at)
        assert abs(found.enqueued_at - result.enqueued_at) < timedelta(minutes=1)

    @pytest.mark.parametrize("kind", [str, uuid.UUID])
    def test_result_that_is_found_is_equal_to_one_that_is_refreshed(self, tasked, call, kind):
        result = tasked.note.enqueue("a")
        call(result, "refresh")
        before = dataclasses.asdict(result)
        call(result, "refresh")

        assert dataclasses.asdict(result) == before
        assert call(tasked.note, "get_result", kind(result.id)) == result

    def test_result_changes_when_it_is_refreshed(self, tasked, call):
        result = tasked.note_a_tick.enqueue()
        run_due()
        before = result.status, result.attempts, result.is_finished
        call(result, "refresh")

        assert before == (READY, 0, False)
        assert (result.status, result.attempts, result.is_finished, result.return_value) == (SUCCESSFUL, 1, True, None)
        assert_in_order(result)

    @pytest.mark.parametrize("result_id", ["123", str(uuid.uuid4())], ids=["no id", "unknown id"])
    def test_missing_result_is_an_error(self, tasked, call, result_id):
        for owner in (tasked.note, task_backends["default"]):
            with pytest.raises(TaskResultDoesNotExist, match=result_id):
                call(owner, "get_result", result_id)

    def test_result_of_another_task_is_an_error(self, tasked, call):
        result = tasked.note.enqueue("a")

        with pytest.raises(import_module(f"{PACKAGE}.exceptions").TaskResultMismatch, match="does not match"):
            call(tasked.note_async, "get_result", result.id)

    def test_periods_of_queues_are_their_own(self, tasked, settings):
        settings.TASKS = {"default": {**TASKS["default"], "OPTIONS": {"queues": {"mail": {"keep_results": "1d"}}}}}
        for queue in ("default", "mail"):
            tasked.note_a_tick.using(queue_name=queue).enqueue()
        run_due()
        travel(timedelta(days=2))

        assert remains["task results"].count("default") == 1


class TestRun:
    def test_task_knows_its_id_and_its_attempt(self, tasked):
        result = tasked.describe_run.enqueue()
        run_due()
        result.refresh()

        assert result.return_value == [result.id, "RUNNING", 1, True]

    def test_everybody_sees_that_a_task_is_running(self, tasked):
        def read(task_result, **given):
            with InAThread(lambda: tasked.note.get_result(task_result.id)) as thread:
                seen.append(thread)

        seen = []
        task_started.connect(read)
        tasked.note.enqueue("a")
        run_due()
        task_started.disconnect(read)

        assert [(thread.answer.status, thread.answer.attempts) for thread in seen] == [(RUNNING, 1)]

    def test_all_due_tasks_run_although_some_fail(self, tasked):
        results = [tasked.note.enqueue("a"), tasked.fail.enqueue("b"), tasked.note.enqueue("c"), tasked.note.enqueue("d")]
        run_due()
        for result in results:
            result.refresh()

        assert Counter(result.status for result in results) == {SUCCESSFUL: 3, FAILED: 1}
        assert run_tasks() == []

    def test_tasks_run_in_the_order_of_enqueue_and_delayed_ones_at_their_time(self, tasked):
        now = timezone.now()
        for name, hours in {"d": 4, "c": 2}.items():
            tasked.note.using(run_after=now + timedelta(hours=hours)).enqueue(name)
        for name in ("a", "b"):
            tasked.note.enqueue(name)
        for _ in range(3):
            run_due()
            travel(timedelta(hours=3))

        assert [*Effect.objects.order_by("pk").values_list("name", flat=True)] == ["a", "b", "c", "d"]

    def test_sender_of_a_signal_is_the_class_of_the_backend(self, tasked, heard):
        result = tasked.note.enqueue("a")
        run_due()

        assert [(name, sender, given.id) for name, sender, given in heard] == [
            (name, ExactlyOnceBackend, result.id) for name in ("enqueued", "started", "finished")
        ]


class TestFailure:
    @pytest.mark.parametrize(
        "names", [["ValueError"], ["ValueError", "ValueError"], ["SystemExit"], ["KeyboardInterrupt"]], ids=" of ".join
    )
    def test_what_a_task_raises_is_in_its_result(self, tasked, names):
        result = tasked.fail_with.enqueue(names, "it failed")
        run_due()
        result.refresh()

        assert (result.status, result.is_finished, result.attempts) == (FAILED, True, 1)
        assert (result.task, result.args, result.kwargs) == (tasked.fail_with, [names, "it failed"], {})
        [error] = result.errors
        assert error.exception_class.__name__ == names[-1]
        assert error.traceback.endswith(f"{names[-1]}: it failed\n")
        with pytest.raises(ValueError, match="Task failed"):
            _ = result.return_value
        assert_in_order(result)
        assert not Effect.objects.exists()

    def test_class_that_cannot_be_imported_is_named_all_the_same(self, tasked):
        result = tasked.fail_with_a_local_class.enqueue()
        run_due()
        result.refresh()

        assert result.errors[0].exception_class_path.endswith("fail_with_a_local_class.<locals>.LocalError")

    def test_value_that_is_not_json_is_a_type_error(self, tasked):
        result = tasked.return_a_set.enqueue()
        run_due()
        result.refresh()

        assert (result.status, result._return_value) == (FAILED, None)
        assert issubclass(result.errors[0].exception_class, TypeError)
        assert "Unsupported type" in result.errors[0].traceback
        assert_in_order(result)

    @pytest.mark.parametrize(
        ("path", "why"),
        [
            ("tests.support.apps.tasked.tasks.not_a_task", "not a task"),
            ("subprocess.check_output", "not a task"),
            ("tests.support.apps.tasked.tasks.nowhere", "ImportError"),
            ("nowhere.task", "ModuleNotFoundError"),
        ],
    )
    def test_path_that_is_not_that_of_a_task_is_not_called(self, tasked, path, why):
        result = tasked.fail.enqueue("a")
        body = bytes(OutboxMessage.objects.get().body)
        OutboxMessage.objects.update(body=body.replace(tasked.fail.module_path.encode(), path.encode()))
        run_due()
        found = task_backends["default"].get_result(result.id)

        assert (found.status, found.task.module_path, found.task.name) == (FAILED, path, path.rpartition(".")[2])
        assert why in found.errors[0].traceback


class TestLog:
    def test_each_step_is_logged_with_the_id_and_the_state(self, tasked, caplog):
        caplog.set_level(logging.DEBUG, PACKAGE)
        done, failed = tasked.note.enqueue("a"), tasked.fail.enqueue("b")
        run_due()
        said = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == PACKAGE]

        for result, level, state in ((done, "INFO", "SUCCESSFUL"), (failed, "ERROR", "FAILED")):
            lines = [(name, line) for name, line in said if result.id in line]
            assert [name for name, _ in lines] == ["DEBUG", "INFO", level]
            for (_, line), word in zip(lines, ("enqueued", "state=RUNNING", f"state={state}"), strict=True):
                assert word in line
        assert "NoneType" not in str(said)
