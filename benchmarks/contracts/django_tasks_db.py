"""django-tasks-db: the harness's contract for it, with the gaps that the harness declares."""

from benchmarks.peers.driving import configure_django

configure_django("django_tasks_db", TASKS={"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}})

from django.db import connection
from django_tasks import task
from django_tasks.signals import task_finished, task_started
from django_tasks_db.models import DBTaskResult
from pytest_obligation import ExternalCall, configure, due_work_contract_suite
from pytest_obligation.integrations.django import django_host
from pytest_obligation.integrations.django.receivers import django_receiver_breaker
from pytest_obligation.integrations.django_tasks import worker_contract
from pytest_obligation.integrations.task_queues import TaskOutcome

from benchmarks.contracts import effects

configure(django_host({"django_tasks_db"}, receiver_breaker=django_receiver_breaker(task_started, task_finished)))


@task
def note(name):
    effects.note(connection.cursor(), name)


@task
def charge(name):
    effects.charge(connection.cursor(), name)


def receive(**given):
    pass


for signal in (task_started, task_finished):
    signal.connect(receive)


def contract(task, *calls):
    return worker_contract(
        name="django-tasks-db",
        enqueue=lambda: task.enqueue(effects.new_name(connection.cursor())).id,
        effect=lambda task_id: effects.count(connection.cursor(), DBTaskResult.objects.get(id=task_id).args_kwargs["args"][0]),
        expected=TaskOutcome(status="SUCCESSFUL", effect=1),
        external_calls=calls,
    )


@due_work_contract_suite(contract(note))
class TestNote: ...


@due_work_contract_suite(contract(charge, ExternalCall(effects, "ask_provider")))
class TestCharge: ...
