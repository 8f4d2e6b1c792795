import contextlib
import os
import threading
from datetime import timedelta

from django.db import transaction

from inbox import batch_handler, idempotent_handler
from tests.support.apps.effects.models import Effect, Unique
from tests.support.apps.workshop import (
    BATCHED,
    BOUNDED,
    EXIT,
    EXITS_AFTER,
    EXITS_ALWAYS,
    EXITS_BEFORE,
    GROUPED,
    LIMIT_SECONDS,
    SINGLE,
    SIZE,
)
from tests.support.waiting import wait_until


@idempotent_handler(BOUNDED, timeout=timedelta(seconds=LIMIT_SECONDS))
def bounded(message):
    Effect.objects.create(name=message.biz_id, detail=str(message.attempt))
    if message.payload.get("do") == "hang once" and _is_first(message):
        threading.Event().wait()
    if message.payload.get("do") == "hear nothing":
        while True:
            with contextlib.suppress(BaseException):
                while True:
                    pass


@idempotent_handler(SINGLE)
def single(message):
    _work(message)


@idempotent_handler(GROUPED, group_commit=SIZE)
def grouped(message):
    _work(message)


@batch_handler(BATCHED, size=SIZE, wait=timedelta(seconds=0.05))
def batched(messages):
    for message in messages:
        _work(message)


def _work(message):
    what = message.payload.get("do")
    if what == "wait for the word":
        Effect.objects.using("other").create(name=f"begun {message.biz_id}")
        wait_until(lambda: Unique.objects.filter(name="go").exists())
    Effect.objects.create(name=message.biz_id, detail=str(message.attempt))
    if what == EXITS_ALWAYS or (what == EXITS_BEFORE and _is_first(message)):
        os._exit(EXIT)
    if what == EXITS_AFTER:
        transaction.on_commit(lambda: os._exit(EXIT))


def _is_first(message):
    """Outside its transaction, so that the next process can see it."""
    _, created = Effect.objects.using("other").get_or_create(name=f"begun {message.biz_id}")
    return created
