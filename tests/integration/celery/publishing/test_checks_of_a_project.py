"""System checks of a project whose tasks go through the outbox, in a process of its own that needs no task."""

import pytest

from tests.support.projects import run_in, settings_of

CELERY = """\
from celery import Celery

app = Celery("shopproject", set_as_current=True)
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
"""
TASKS = """\
from celery import shared_task

from outbox.celery import OutboxTask


@shared_task(base=OutboxTask)
def send_receipt(order_id): ...


@shared_task
def count(): ...
"""
DATABASE = {"ENGINE": "django.db.backends.postgresql", "NAME": "shop"}  # checks do not connect to it
SAME_BROKER = "amqp://user:secret@rabbit.example//"


class Project:
    """With a Celery app that its settings' package imports, as Celery's manual says, and an app `shop` with tasks."""

    def __init__(self, directory, broker=SAME_BROKER):
        self._directory = directory
        for name, text in {
            "shopproject/__init__.py": "from .celery import app\n",
            "shopproject/celery.py": CELERY,
            "shopproject/settings.py": settings_of(
                "outbox", "shop", database=DATABASE, OUTBOX={"BROKER_URL": SAME_BROKER}, CELERY_BROKER_URL=broker
            ),
            "shop/__init__.py": "",
            "shop/tasks.py": TASKS,
        }.items():
            self.write(name, text)

    def write(self, name, text):
        self.path(name).write_text(text)

    def path(self, name):
        path = self._directory / name
        path.parent.mkdir(exist_ok=True)
        return path

    def check(self):
        done = run_in(self._directory, "shopproject.settings", "-m", "django", "check")
        assert done.returncode == 0, done.stdout
        return done.stdout


@pytest.fixture
def project(tmp_path):
    return lambda **options: Project(tmp_path, **options)


def test_different_brokers_raise_w004_although_the_project_has_imported_no_task(project):
    said = project(broker="redis://:secret@localhost/0").check()

    assert "outbox.W004" in said
    assert "uses 'redis://***@localhost" in said
    assert "secret" not in said


def test_project_that_has_celery_imported_and_no_app_of_it_gets_its_tasks_not_imported(project):
    """A library may import Celery, and Django's own tasks are in modules of that name, too."""
    project = project()
    project.write("shopproject/__init__.py", "import celery\n")
    project.write("shop/tasks.py", "raise SystemExit('the tasks were imported')\n")

    assert "System check identified no issues" in project.check()


def test_tasks_that_cannot_be_imported_do_not_break_the_check(project):
    project = project()
    project.write("shop/tasks.py", TASKS + "\nimport no_such_module\n")

    assert "System check identified no issues" in project.check()


HOOKS = """\
from functools import partial

from django.db import transaction
from django.db.transaction import on_commit

import shop.tasks
from shop import tasks
from shop.tasks import count, send_receipt as receipt

from .tasks import send_receipt


def place(order):
    transaction.on_commit(lambda: send_receipt.delay(order))  # found
    on_commit(partial(receipt.apply_async, [order]), using="default")  # found
    transaction.on_commit(tasks.send_receipt.delay)  # found
    transaction.on_commit(lambda: shop.tasks.send_receipt.apply_async([order]))  # found
    send_receipt.delay_on_commit(order)  # found
    transaction.on_commit(count.delay)
    transaction.on_commit(lambda: unknown.delay(order))
    transaction.on_commit(lambda: print(order))
    transaction.on_commit(place)
    send_receipt.delay(order)
"""


def test_calls_of_outbox_tasks_in_on_commit_hooks_raise_w006_for_each_line(project):
    project = project()
    project.write("shop/services.py", HOOKS)
    project.write("shop/broken.py", "on_commit(")
    project.write("shop/tests.py", HOOKS)
    project.path("shop/.#services.py").symlink_to("anna@host.17")  # by which Emacs locks a file
    expected = {number for number, line in enumerate(HOOKS.splitlines(), 1) if "# found" in line}

    said = project.check()

    found = [line for line in said.splitlines() if "outbox.W006" in line]
    assert {int(line.partition("services.py, line ")[2].partition(":")[0]) for line in found} == expected
    assert len(found) == len(expected) == 5
    assert all("the task shop.tasks.send_receipt is called after" in line for line in found)
    assert "call it inside the transaction, without on_commit" in said
