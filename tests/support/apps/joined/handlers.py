"""The join: one row per run, and nothing in the database that would stop a second one. Likewise a request and its answer."""

import os
from datetime import timedelta

from inbox import Message, idempotent_handler
from inbox.contrib.joins import Join, correlated, joined_handler
from outbox import publish
from tests.support.apps.effects.models import Effect
from tests.support.apps.joined import ANSWERED, ASKED, TOPICS

TIMEOUT = timedelta(seconds=float(os.environ.get("TIMEOUT_SECONDS", "3600")))


@joined_handler(all_of=TOPICS, correlate="run_id", deadline=timedelta(hours=1))
def report(join: Join) -> None:
    Effect.objects.create(name=join.run_id, detail=",".join(join.messages))


@idempotent_handler(ASKED)
def answer(message: Message) -> None:
    """The other service."""
    if message.payload["is_answered"]:
        publish(ANSWERED, {"result": "paid"})


def give_up(asked: Message) -> None:
    Effect.objects.create(name=asked.payload["payment"], detail="no answer")


@correlated(request=ASKED, answer=ANSWERED, timeout=TIMEOUT, on_timeout=give_up)
def settle(asked: Message, answered: Message) -> None:
    Effect.objects.create(name=asked.payload["payment"], detail=answered.payload["result"])
