from inbox import idempotent_handler
from tests.support.apps.effects.models import Effect
from tests.support.apps.newcomer import NAME, TOPIC


@idempotent_handler(TOPIC, name=NAME, ordered=True, start_from="beginning")
def work(message):
    Effect.objects.create(name=message.key, detail=str(message.payload["n"]))
