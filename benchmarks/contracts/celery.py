"""Celery on RabbitMQ, results in Redis: the harness's contract for it, with what Celery has against loss and repetition."""

import os
from functools import cache

import psycopg
from celery import Celery
from celery.result import AsyncResult
from pytest_obligation import Host, configure, due_work_contract_suite
from pytest_obligation.integrations.celery_worker import worker_contract, worker_history
from pytest_obligation.integrations.task_queues import TaskOutcome

from benchmarks.contracts import effects

configure(Host(production_packages=frozenset({"celery"})))

app = Celery("contracts", broker=os.environ["BROKER_URL"], backend=os.environ["REDIS_URL"])
app.conf.update(
    broker_transport_options={"confirm_publish": True},
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_deduplicate_successful_tasks=True,
)


@cache
def cursor():
    return psycopg.connect(os.environ["DATABASE_URL"], autocommit=True).cursor()


@app.task(name="note")
def note(name):
    effects.note(cursor(), name)


@app.task(name="charge")
def charge(name):
    effects.charge(cursor(), name)


@app.task(name="link")
def link(name):
    effects.charge(cursor(), name)


def history(task):
    names = {}

    def send():
        name = effects.new_name(cursor())
        sent = task.apply_async([name], link=link.si(f"after {name}"))
        names[sent.id] = (name, f"after {name}")
        return sent.id

    def observe(task_id):
        found = [effects.count(cursor(), name) for name in names[task_id]]
        return TaskOutcome(status=AsyncResult(task_id, app=app).status, effect=found)

    return worker_history(
        name=f"the worker runs {task.name}",
        app="benchmarks.contracts.celery:app",
        task=task.name,
        send=send,
        observe=observe,
        initial=TaskOutcome(status="PENDING", effect=[0, 0]),
        expected=TaskOutcome(status="SUCCESS", effect=[1, 1]),
    )


@due_work_contract_suite(worker_contract(name="Celery", process_handoffs=(history(note), history(charge))))
class TestWorker: ...
