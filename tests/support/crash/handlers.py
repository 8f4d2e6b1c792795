"""The effect: one row per run, and nothing in the database that would stop a second one."""

from __future__ import annotations

import os
from pathlib import Path

from django.db import IntegrityError
from django.db.models.functions import Now

from inbox import Message, idempotent_handler
from outbox import Answer, UndecidedMessage, checker, publish
from tests.support.apps.effects.models import Effect, Unique
from tests.support.crash.failpoints import record
from tests.support.crash.oracle import CHAINED, Fact
from tests.support.waiting import wait_until


class NotThisTime(Exception):
    """The handler fails because its message says so."""


@idempotent_handler("crash.done", name="crash.apply")
def apply(message: Message) -> None:
    operation, how = message.payload["operation"], message.payload["how"]
    record("RUNS", operation)
    effect = Effect.objects.create(name=operation, detail=f"{os.getpid()}:{message.attempt}")
    if how == "chain":
        publish("crash.chained", {"operation": operation}, biz_id=operation)
    elif how == "fail first" and message.attempt == 1:
        raise NotThisTime
    elif how == "swallow first" and message.attempt == 1:
        try:
            Unique.objects.create(name=operation)  # the producer has written that one
        except IntegrityError:
            return
    elif how == "timed":
        Effect.objects.filter(pk=effect.pk).update(at=Now())  # by the database's clock, as the instant that it is compared with
    elif how == "held":
        wait_until(lambda: not Path(os.environ["GATE"]).exists())


@idempotent_handler("crash.told", name="crash.take")
def take(message: Message) -> None:
    """A checker, so that the message can be prepared; only the callback matters."""


@idempotent_handler("crash.chained", name="crash.apply_chained", biz_id=lambda message: message.payload["operation"])
def apply_chained(message: Message) -> None:
    Effect.objects.create(name=CHAINED + message.payload["operation"], detail=f"{os.getpid()}:{message.attempt}")


@checker("crash.done")
def took_place(message: UndecidedMessage) -> Answer:
    """Whether the operation of a prepared message has taken place; if not, it cannot any more."""
    operation = message.payload["operation"]
    Unique.objects.get_or_create(name=Fact.DECIDED.of(operation))
    return Answer.COMMIT if Unique.objects.filter(name=operation).exists() else Answer.ROLLBACK
