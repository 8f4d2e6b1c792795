from datetime import timedelta

from inbox import Backoff, Message, Retry, idempotent_handler
from outbox import Answer, UndecidedMessage, checker
from tests.projects.cycle import HANDLER, TOPIC
from tests.projects.shop.models import Effect

AT_ONCE = Backoff(base=timedelta(milliseconds=10), cap=timedelta(milliseconds=10))


@idempotent_handler(TOPIC, name=HANDLER, retry=Retry(max_attempts=2, backoff=AT_ONCE))
def book(message: Message) -> None:
    """Fails once, or until the row "repaired" exists, if the payload says so."""
    Effect.objects.create(name=message.biz_id, topic=TOPIC)
    if message.payload == "fails once" and message.attempt == 1:
        raise RuntimeError("as the payload says")
    if message.payload == "fails" and not Effect.objects.filter(name="repaired", topic=TOPIC).exists():
        raise RuntimeError("as the payload says, until it is repaired")


@checker(TOPIC)
def is_decided(message: UndecidedMessage) -> Answer:
    return Answer.ROLLBACK if message.biz_id.endswith("rolled back") else Answer.COMMIT
