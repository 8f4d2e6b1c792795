"""Publishing for a client that may repeat a request whose answer it has not received.

An `Idempotency-Key` is the biz-id of a unique message, so no table of keys is needed: of any number of requests with one key,
one is stored, and the others wait for its commit and find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from django.db import transaction

from outbox.api import PublishedMessage, publish_many
from outbox.console.http.problems import Problem
from outbox.http.schemas import NewMessage
from outbox.store.unique import has_payload


def with_key(message: NewMessage, key: str) -> NewMessage:
    """The message of a request with an `Idempotency-Key`; in quotes, as the draft of the standard has it, or without.

    Raises:
        Problem: the message has a biz-id already, or the key is empty.
    """
    if message.biz_id is not None:
        raise Problem(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "The Idempotency-Key becomes the biz-id of the message, which has one already: send one of the two. A message with "
            "a biz_id is published once with unique: true.",
        )
    if len(key) > 1 and key[0] == key[-1] == '"':
        key = key[1:-1]
    if not key.strip():
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "The Idempotency-Key is empty: send a new UUID for each message.")
    return message.model_copy(update={"biz_id": key, "unique": True})


def publish_all(messages: Sequence[NewMessage], alias: str) -> list[PublishedMessage]:
    """Publish messages in one transaction, and return after its commit.

    Raises:
        Problem: an earlier message has the topic and biz-id of a unique one, and another payload. Nothing was published.
        outbox.InvalidMessage, outbox.PayloadTooLarge: nothing was published.
    """
    with transaction.atomic(using=alias, durable=True):
        published = publish_many([message.draft for message in messages], using=alias)
        for index, (found, message) in enumerate(zip(published, messages, strict=True)):
            if not found.created and not has_payload(alias, found.id, message.payload):
                raise _conflict(found, index)
    return published


def _conflict(earlier: PublishedMessage, index: int) -> Problem:
    return Problem(
        HTTPStatus.CONFLICT,
        f"The message {earlier.id} has the topic {earlier.topic} and the biz-id {earlier.biz_id}, and another payload. Nothing "
        "was published. Use another biz-id or Idempotency-Key for another fact.",
        id=str(earlier.id),
        index=index,
    )
