"""Publishing for a client that may repeat a request whose answer it has not received.

With an `Idempotency-Key` the answer is stored with the messages, as that of an idempotent view. The key also names the message,
so consumers suppress a second one that is published after the answer has expired.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from http import HTTPStatus

from django.db import transaction

from exactly_once.contrib.views.answering import Idempotency
from exactly_once.contrib.views.decorators import declared
from exactly_once.problems import Problem
from outbox.api import PublishedMessage, contradicts, publish_many
from outbox.contrib.http.schemas import NewMessage
from outbox.store.dialect import database_of

_EXPIRES_IN = timedelta(days=7)
declared.add(database_of(None))  # for the check


def idempotency(client: str, alias: str) -> Idempotency:
    """How requests of this client with an `Idempotency-Key` are answered."""
    return Idempotency(scope=lambda request: f"http:{client}", required=False, expires_in=_EXPIRES_IN, using=alias)


def publish_all(messages: Sequence[NewMessage], alias: str, *, name: str | None = None) -> list[PublishedMessage]:
    """Publish messages in one transaction.

    Args:
        name: the biz-id of messages that have none.

    Raises:
        Problem: an earlier message has the topic and biz-id of a unique one, and another payload. Nothing was published.
        outbox.InvalidMessage, outbox.PayloadTooLarge: nothing was published.
    """
    drafts = [replace(message.draft, biz_id=message.biz_id or name) for message in messages]
    with transaction.atomic(using=alias):
        published = publish_many(drafts, using=alias)
        for index, (found, message) in enumerate(zip(published, messages, strict=True)):
            if contradicts(found, message.payload, using=alias):
                raise Problem(
                    HTTPStatus.CONFLICT,
                    f"The message {found.id} has the topic {found.topic} and the biz-id {found.biz_id}, and another payload. "
                    "Nothing was published. Use another biz-id for another fact.",
                    id=str(found.id),
                    index=index,
                )
    return published
