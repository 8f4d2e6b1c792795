"""Tasks whose effect is a row. Import them where `TASKS` is in force: `@task` asks the backend for its class."""

from __future__ import annotations

import asyncio
import builtins
from dataclasses import replace
from functools import reduce
from importlib import import_module

from django.db import IntegrityError, transaction

from inbox import Reject, Retry, RetryLater
from inbox.contrib.tasks.compat import PACKAGE, TaskContext
from tests.support.apps.effects.models import Effect
from tests.support.apps.tasked.provider import provider

task = import_module(PACKAGE).task
not_a_task = len


def task_with(*, takes_context=False, queue_name="default", **own):
    """`@task` with options of the backend's own, which the decorator of Django 6.0 does not take."""
    return lambda function: replace(task(takes_context=takes_context, queue_name=queue_name)(function), **own)


@task
def note(name, detail=""):
    Effect.objects.create(name=name, detail=detail)
    return {"noted": [name, detail]}


@task
def note_a_tick():
    Effect.objects.create(name="tick")


@task
async def note_async(name):
    await Effect.objects.acreate(name=name)
    return name


@task(takes_context=True)
def note_attempt(context, name):
    """Fails in its first attempt."""
    Effect.objects.create(name=name, detail=str(context.attempt))
    if context.attempt == 1:
        raise ValueError(f"the first attempt of {name}")
    return [error.exception_class_path for error in context.task_result.errors]


@task(queue_name="mail")
def fail(name):
    Effect.objects.create(name=name)
    raise KeyError(name)


@task(queue_name="mail")
def fail_with(names, text):
    """Raise a built-in exception; with several names each is the argument of the next."""
    Effect.objects.create(name=text)
    raise reduce(lambda argument, name: getattr(builtins, name)(argument), names, text)


@task(queue_name="mail")
def fail_with_a_local_class():
    class LocalError(Exception):
        pass

    raise LocalError


@task(takes_context=True)
def describe_run(context):
    given = context.task_result
    return [given.id, given.status, context.attempt, isinstance(context, TaskContext)]


@task_with(retry=Retry(max_attempts=1))
def try_once():
    raise TimeoutError


@task
def reject(name):
    raise Reject(f"{name} is wrong")


@task
def wait(name):
    raise RetryLater("1h", reason=f"{name} is not ready")


@task
def return_a_set():
    Effect.objects.create(name="set")
    return {1, 2}


@task
def return_a_nul():
    Effect.objects.create(name="nul")
    return "a\0b"


@task_with(lease=True, takes_context=True, queue_name="payments")
def charge(context, name):
    """At least once, with the message id as the idempotency key."""
    answer = context.message.step("charge", lambda: provider.charge(context.message.id))
    Effect.objects.get_or_create(name=name)
    return answer


@task_with(lease=True, takes_context=True, queue_name="payments")
def fail_after_a_step(context, name):
    """Fails in its first attempt, after a step."""
    context.message.step("task", lambda: "the step")
    if context.attempt == 1:
        raise ValueError(name)
    return f"the end of {name}"


cancelled = []


@task
async def sleep(seconds):
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        cancelled.append(seconds)
        raise


@task_with(lease=True, takes_context=True, queue_name="payments")
def charge_once(context, name):
    """By a provider without idempotency keys."""
    return context.message.step("charge", lambda: provider.charge(name), repeatable=False)


@task(takes_context=True, queue_name="payments")
def charge_in_a_transaction(context, name):
    return provider.charge(context.message.id)


@task
def publish_another(name):
    return note.enqueue(name).id


@task
def note_unless_taken(name):
    try:
        with transaction.atomic():
            raise IntegrityError(name)  # noqa: TRY301
    except IntegrityError:
        return note.func(name)
