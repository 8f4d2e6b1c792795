"""Handlers whose biz-id function reads the body before a row is there."""

from datetime import timedelta

from inbox import Lease, idempotent_handler, leased_handler
from tests.support.apps.effects.models import Effect
from tests.support.apps.named import NAMED_AND_LEASED, NAMED_AND_ORDERED
from tests.support.apps.worker.handlers import name_in_the_payload


@idempotent_handler(NAMED_AND_ORDERED, biz_id=name_in_the_payload, ordered=True)
def named_and_ordered(message):
    Effect.objects.create(name=message.biz_id, detail=str(message.attempt))


# Another message may be running when its process ends, and runs again when its lease has ended.
@leased_handler(NAMED_AND_LEASED, biz_id=name_in_the_payload, lease=Lease(duration=timedelta(seconds=5)))
def named_and_leased(message):
    Effect.objects.create(name=message.biz_id, detail=str(message.attempt))
