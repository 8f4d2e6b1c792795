"""The effect: one row per run, and nothing in the database that would stop a second one, or one out of order."""

from inbox import idempotent_handler
from tests.support.apps.effects.models import Effect
from tests.support.apps.ordered import CANCELLED, CREATED, STEP


class NotYet(Exception):
    """It fails once because its message says so."""


@idempotent_handler(STEP, ordered=True)
def step(message):
    Effect.objects.create(name=message.biz_id, detail=message.key)
    if message.payload["fails"] and message.attempt == 1:
        raise NotYet


@idempotent_handler(CREATED, CANCELLED, ordered=True)
def change(message):
    step(message)
