"""Handlers whose biz-id function reads the body before a row is there."""

from inbox import idempotent_handler, leased_handler
from tests.support.apps.effects.models import Effect
from tests.support.apps.named import NAMED_AND_LEASED, NAMED_AND_ORDERED
from tests.support.apps.worker.handlers import name_in_the_payload


@idempotent_handler(NAMED_AND_ORDERED, biz_id=name_in_the_payload, ordered=True)
def named_and_ordered(message):
    Effect.objects.create(name=message.biz_id, detail=str(message.attempt))


@leased_handler(NAMED_AND_LEASED, biz_id=name_in_the_payload)
def named_and_leased(message):
    Effect.objects.create(name=message.biz_id, detail=str(message.attempt))
