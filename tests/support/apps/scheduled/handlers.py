"""One row per tick, and nothing in the database that would stop a second one."""

from inbox import Message, idempotent_handler
from tests.support.apps.effects.models import Effect
from tests.support.apps.scheduled import TOPIC


@idempotent_handler(TOPIC)
def recount(message: Message) -> None:
    Effect.objects.create(name=message.biz_id)
