"""Apps whose tasks can be called, and real workers."""

import gc
import json

import pytest
from django.db import transaction

from outbox.models import OutboxMessage
from outbox.states import State
from tests.integration.celery.apps import close
from tests.integration.celery.publishing.project import make_app
from tests.support.waiting import wait_until
from tests.support.workers import CeleryWorker

QUEUES = ("celery", "second")
SECONDS = 60
"""How long a result may take."""


@pytest.fixture
def make():
    """Make apps that are closed after the test: `make(broker, **settings)`. By default they get no results."""
    made = []

    def build(broker, results="cache+memory://", **settings):
        made.append(make_app(broker, results, **settings))
        return made[-1]

    yield build
    gc.collect()  # a result that is collected later would unsubscribe at its backend
    for app in made:
        close(app)


@pytest.fixture
def app(broker, make):
    return make(broker)


@pytest.fixture
def tasks(broker, results, make):
    """Tasks whose results come from the workers."""
    return make(broker, results).tasks


class Worker(CeleryWorker):
    """With a pool of two processes."""

    def __init__(self, broker, results, environment, log, **settings):
        given = {"CELERY_BROKER": broker, "CELERY_RESULTS": results, "CELERY_SETTINGS": json.dumps(settings)}
        pool = ["--pool", "prefork", "--concurrency", "2", "--queues", ",".join(QUEUES)]
        super().__init__("tests.integration.celery.publishing.worker", {**environment, **given}, log, *pool)


def called(call):
    with transaction.atomic():
        return call()


def published():
    """All rows, once the relay has stored the confirms of the broker."""
    wait_until(lambda: not OutboxMessage.objects.exclude(state=State.PUBLISHED).exists())
    return list(OutboxMessage.objects.order_by("pk"))
