import os
import threading
from pathlib import Path

from outbox import Answer, checker, on_published
from tests.support.apps.effects.models import Effect
from tests.support.apps.stalling import CHECKED, CHECKED_IN_VAIN, HANGING, QUICK, WAITING
from tests.support.crash.failpoints import record
from tests.support.waiting import wait_until


@checker(CHECKED)
def is_known(message):
    return Answer.COMMIT


@checker(CHECKED_IN_VAIN)
def asks_a_service_that_never_answers(message):
    if message.payload.get("is_answered"):
        return Answer.COMMIT
    record("RUNS", message.biz_id)
    return threading.Event().wait()


@on_published(QUICK)
def quick(message):
    _take_effect(message)


@on_published(WAITING)
def waits_for_the_gate(message):
    """Its effect is written first, so that the transaction holds something while it waits."""
    _take_effect(message)
    record("RUNS", message.biz_id)
    wait_until(lambda: not Path(os.environ["GATE"]).exists())


@on_published(HANGING)
def calls_a_service_that_never_answers(message):
    record("RUNS", message.biz_id)
    threading.Event().wait()


def _take_effect(message):
    Effect.objects.create(name=message.biz_id, detail=str(message.call))
