"""Celery tasks like those of a shop, and the apps that know them.

The arguments say what a task does. Through rows outside its own transaction it reports that it has begun, and waits until it is
released.
"""

import os
from decimal import Decimal

from celery import Celery, shared_task
from django.db import transaction

from inbox.celery import idempotent_task
from tests.support.apps.effects.models import Effect, Unique
from tests.support.waiting import wait_until


def make_app(broker, results, **settings):
    app = Celery("tests", broker=broker, backend=results, set_as_current=False)
    app.conf.update(broker_connection_retry_on_startup=True, worker_prefetch_multiplier=1, **settings)
    app.finalize()
    return app


@idempotent_task(name="shop.charge", biz_id="order.id")
def charge(order, amount=Decimal(0)):
    """The plain case: its result holds a type that only kombu's JSON can carry."""
    Effect.objects.create(name=order["id"], detail=str(amount))
    return {"charged": amount, "by": os.getpid()}


@idempotent_task(name="shop.work", bind=True, biz_id="order_id", max_retries=0)
def work(self, order_id, how="work"):
    WAYS[how](self, order_id)
    return f"done {order_id}"


@idempotent_task(name="shop.try_again", bind=True, biz_id="order_id", max_retries=3)
def try_again(self, order_id):
    Effect.objects.create(name=order_id, detail=str(self.request.retries))
    if not self.request.retries:
        raise self.retry(countdown=0)
    return self.request.retries


@idempotent_task(
    name="shop.by_itself", bind=True, biz_id="order_id", autoretry_for=[ConnectionError], retry_kwargs={"countdown": 0}
)
def by_itself(self, order_id):
    Effect.objects.create(name=order_id, detail=str(self.request.retries))
    if not self.request.retries:
        raise ConnectionError("not yet")
    return self.request.retries


@idempotent_task(name="shop.follow")
def follow(before, order_id):
    """The next task of a chain, deduplicated on its task id."""
    Effect.objects.create(name=f"followed {order_id}", detail=str(before))


@shared_task(name="shop.bare", acks_late=True, reject_on_worker_lost=True)
def bare(order_id):
    """The same task without the inbox."""
    _wait_until_released(None, order_id)


def _work(task, order_id):
    Effect.objects.create(name=order_id)


def _wait_until_released(task, order_id):
    _work(task, order_id)
    _tell_and_wait(order_id)


def _wait_after_the_commit(task, order_id):
    _work(task, order_id)
    transaction.on_commit(lambda: _tell_and_wait(order_id))


def _tell_and_wait(order_id):
    Effect.objects.using("other").create(name=f"begun {order_id}", detail=str(os.getpid()))
    wait_until(lambda: Unique.objects.using("other").filter(name=f"go {order_id}").exists())


def _die(task, order_id):
    """Kills its process until the row `mended` exists."""
    _work(task, order_id)
    if not Unique.objects.using("other").filter(name="mended").exists():
        Effect.objects.using("other").create(name=f"died {order_id}")
        os._exit(13)


def _die_with_the_worker_after_the_commit(task, order_id):
    """At the first delivery only: the next one is a duplicate and does not run the function."""
    _work(task, order_id)
    transaction.on_commit(lambda: os.killpg(os.getpgid(0), 9))


def _die_after_the_commit(task, order_id):
    _work(task, order_id)
    transaction.on_commit(lambda: os._exit(13))


WAYS = {
    "work": _work,
    "wait until released": _wait_until_released,
    "wait after the commit": _wait_after_the_commit,
    "die": _die,
    "die with the worker after the commit": _die_with_the_worker_after_the_commit,
    "die after the commit": _die_after_the_commit,
}


def release(order_id):
    Unique.objects.using("other").create(name=f"go {order_id}")


def begun(order_id):
    """The ids of the processes in which it has begun, in order."""
    rows = Effect.objects.using("other").filter(name=f"begun {order_id}").order_by("pk")
    return [int(pid) for pid in rows.values_list("detail", flat=True)]
