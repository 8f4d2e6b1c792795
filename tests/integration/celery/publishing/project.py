"""A Celery app like that of a Django project, with tasks whose calls go through the outbox.

The tests make one in their own process, for calls; a worker's process makes one from its environment (`worker.py`).
"""

from celery import Celery
from django.db import transaction

from inbox.celery import IdempotentTask
from outbox.celery import OutboxTask
from tests.support.apps.effects.models import Effect


def make_app(broker, results, task_cls=None, **settings):
    app = Celery("tests", broker=broker, backend=results, set_as_current=False, task_cls=task_cls)
    usual = {
        "accept_content": ["json", "pickle", "yaml"],
        "broker_connection_retry_on_startup": True,
        "broker_transport_options": {} if broker.startswith("redis") else {"confirm_publish": True},
    }
    app.conf.update({**usual, **settings})
    for function, options in _TASKS:
        app.task(function, **{"base": OutboxTask, "name": f"tests.{function.__name__}", "shared": False, **options})
    app.finalize()
    return app


class Once(IdempotentTask, OutboxTask):
    """Both halves."""


_TASKS = []


def _task(**options):
    def remember(function):
        _TASKS.append((function, options))
        return function

    return remember


@_task()
def add(x, y):
    return x + y


@_task()
def total(numbers):
    return sum(numbers)


@_task()
def write(name, detail=""):
    Effect.objects.create(name=name, detail=str(detail))
    return name


@_task(ignore_result=True, serializer="pickle", compression="zlib", expires=3600, time_limit=60)
def elaborate(*args, **kwargs):
    pass


@_task(bind=True)
def look(self):
    """What the worker knows about this call."""
    return {"eta": self.request.eta, "routing_key": self.request.delivery_info["routing_key"]}


@_task(bind=True)
def order(self, name, *, fails=False):
    """A task that calls another: the effect and the next task commit together."""
    with transaction.atomic():
        Effect.objects.create(name=f"ordered {name}")
        self.app.tasks["tests.write"].delay(f"followed {name}")
        if fails:
            raise ValueError(name)


@_task(bind=True, max_retries=3)
def try_again(self, name):
    """Calls `self.retry()` inside its transaction, which that rolls back."""
    with transaction.atomic():
        Effect.objects.create(name=f"tried {name}", detail=str(self.request.retries))
        if self.request.retries < 2:
            raise self.retry(countdown=0)


@_task(bind=True)
def replace_itself(self, name):
    """Replaces itself by another task inside a transaction, which the replacement rolls back."""
    with transaction.atomic():
        Effect.objects.create(name=f"replaced {name}")
        raise self.replace(self.app.tasks["tests.write"].si(f"replacement of {name}"))


@_task(base=Once, bind=True, biz_id="order_id", max_retries=3)
def charge(self, order_id, *, retries=0):
    Effect.objects.create(name=f"charged {order_id}", detail=str(self.request.retries))
    if self.request.retries < retries:
        raise self.retry(countdown=0)
    return order_id
