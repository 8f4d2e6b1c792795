"""An app whose tasks can be called, and real workers."""

import json
import uuid
from datetime import timedelta

import pytest
from celery import Celery

from inbox.celery import IdempotentTask, idempotent_task
from tests.integration.celery.apps import close
from tests.integration.celery.handling.project import make_app
from tests.integration.celery.redelivery import takeover_settings
from tests.support import mortal
from tests.support.workers import CeleryWorker, as_environment, migrate

INBOX = {
    "MAX_ATTEMPTS": 3,
    "BACKOFF": (timedelta(seconds=1), timedelta(hours=2)),
    "DUPLICATE_TIMEOUT": timedelta(milliseconds=200),
    "REDELIVERY_AFTER": timedelta(hours=1),
}

mortal_database = mortal.mortal_database


@pytest.fixture
def app(broker, results):
    app = make_app(broker, results)
    yield app
    close(app)


@pytest.fixture
def tasks(app):
    return app.tasks


@pytest.fixture
def worker(broker, results, process_environment, tmp_path):
    """Make workers: `with worker(pool="threads") as running`. It has begun to take tasks.

    A worker with `takes_over=True` is given what another worker has in hand.
    """
    count = 0

    def make(*, pool="prefork", concurrency=2, takes_over=False, database=None, **settings):
        nonlocal count
        count += 1
        if takes_over:
            settings |= takeover_settings(broker)
        given = {"CELERY_BROKER": broker, "CELERY_RESULTS": results, "CELERY_SETTINGS": json.dumps(settings)}
        environment = {
            **process_environment,
            "DJANGO_SETTINGS_MODULE": "tests.support.apps.worker.settings",
            **as_environment(INBOX=INBOX),
        }
        if database:
            environment["DATABASE_URL"] = database
        return Worker({**environment, **given}, tmp_path / f"worker{count}.log", pool, concurrency)

    return make


@pytest.fixture
def migrated_mortal_database(mortal_database, process_environment, tmp_path):
    migrate({**process_environment, "DATABASE_URL": mortal_database}, tmp_path / "migrate.log")
    return mortal_database


@pytest.fixture
def local_app(settings):
    """An app whose broker and result backend are in this process's memory."""
    settings.INBOX = INBOX
    app = Celery("tests", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.broker_transport_options = {"polling_interval": 0.01}
    # The process has one memory for all of them.
    app.control.purge()
    yield app
    close(app)


@pytest.fixture
def a_task(local_app):
    """Make a task of a function: `a_task(function, biz_id="order_id")`."""

    def make(function, *, base=IdempotentTask, name="tests.task", **options):
        local_app.task(function, base=base, name=name, shared=False, **options)
        return local_app.tasks[name]

    return make


@pytest.fixture
def decorated(local_app, current):
    """Make a task by the decorator, as a project does: `decorated(function, retry=…)`."""
    current(local_app)

    def make(function, **options):
        # Every app of this process has every shared task, so each has a name of its own.
        name = f"tests.decorated.{uuid.uuid4()}"
        idempotent_task(name=name, **options)(function)
        return local_app.tasks[name]

    return make


@pytest.fixture
def sent(local_app):
    """Take the messages in the queue of the tasks."""

    def take():
        taken = []
        with local_app.connection_for_read() as connection, connection.SimpleQueue("celery") as queue:
            while queue.qsize():
                message = queue.get(block=False)
                message.ack()
                taken.append(message)
        return taken

    return take


class Worker(CeleryWorker):
    """It has begun to take tasks."""

    def __init__(self, environment, log, pool, concurrency):
        arguments = ["--pool", pool, "--concurrency", str(concurrency)]
        super().__init__("tests.integration.celery.handling.worker", environment, log, *arguments)

    def start(self):
        super().start()
        self.until(self.is_ready)
        return self
