"""Handlers under a lease. The message says what they do: `{"do": …}`."""

import os
import signal
from datetime import timedelta

from inbox import Lease, leased_handler
from tests.support.apps.effects.models import Effect, Unique
from tests.support.apps.leased import LEASED_JOB
from tests.support.waiting import wait_until

LEASE = timedelta(seconds=float(os.environ.get("LEASE_SECONDS", "3")))


@leased_handler(LEASED_JOB, name="leased.work", lease=Lease(duration=LEASE, limit=timedelta(minutes=5)))
def work(message):
    Effect.objects.create(name=f"begun {message.biz_id}", detail=str(message.attempt))
    WAYS[message.payload["do"]](message)
    Effect.objects.create(name=message.biz_id, detail=str(message.attempt))


def _die_once(message):
    if message.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _die(message):
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_the_word(message):
    """The first run waits for the test; the run that takes over does not."""
    if message.attempt == 1:
        wait_until(lambda: Unique.objects.filter(name=f"go {message.biz_id}").exists())


def _wait_for_the_word_each_time(message):
    wait_until(lambda: Unique.objects.filter(name=f"go {message.biz_id}").exists())


def _die_in_a_step_once(message):
    """Between the effect of the step and the storing of its result."""

    def charge():
        Effect.objects.create(name=f"charged {message.biz_id}")
        if message.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    message.step("charge", charge, repeatable=message.payload["repeatable"])


WAYS = {
    "die once": _die_once,
    "die": _die,
    "die in a step once": _die_in_a_step_once,
    "wait for the word": _wait_for_the_word,
    "wait for the word each time": _wait_for_the_word_each_time,
}
