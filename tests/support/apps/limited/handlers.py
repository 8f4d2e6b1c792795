from inbox import Shed, idempotent_handler
from tests.support.apps.effects.models import Effect
from tests.support.apps.limited import ABOVE, NAME, RATE, TOPIC


@idempotent_handler(
    TOPIC,
    name=NAME,
    rate_limit=f"{RATE}/s",
    shed=Shed(above=ABOVE, droppable=lambda message: message.payload["kind"] == "view"),
)
def work(message):
    Effect.objects.create(name=message.biz_id, detail=message.payload["kind"])
