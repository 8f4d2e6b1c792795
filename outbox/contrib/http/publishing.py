"""Publishing for a client that may repeat a request whose answer it has not received.

An `Idempotency-Key` is in the biz-id of a unique message, so no table of keys is needed: of any number of requests with one
key, one is stored, and the others wait for its commit and find it. Another request with the key is an error, whichever of its
fields differs, as in draft-ietf-httpapi-idempotency-key-header.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus

from django.db import transaction

from exactly_once.console.http.problems import Problem
from exactly_once.sql.days import LIVE
from outbox.api import PublishedMessage, publish_many
from outbox.contrib.http.schemas import NewMessage
from outbox.store import selecting
from outbox.store.unique import has_payload


def publish_with_key(message: NewMessage, biz_id: str, alias: str) -> PublishedMessage:
    """Publish the message of a request with an `Idempotency-Key`, and return after its commit.

    Raises:
        Problem: the message has a biz-id already, or another request had the key. Nothing was published.
        outbox.InvalidMessage, outbox.PayloadTooLarge: nothing was published.
    """
    if message.biz_id is not None:
        raise Problem(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "The Idempotency-Key becomes the biz-id of the message, which has one already: send one of the two. A message with "
            "a biz_id is published once with unique: true.",
        )
    with transaction.atomic(using=alias, durable=True):
        (published,) = publish_many([replace(message.draft, biz_id=biz_id, unique=True)], using=alias)
        digest = hashlib.sha256(json.dumps(dict(message), sort_keys=True, default=str).encode()).hexdigest()
        # By its id, not its position: see `has_payload`.
        rows = selecting.identified(alias, [published.id])
        if published.created:
            rows.filter(day=LIVE).update(request_digest=digest)
        elif rows.exclude(request_digest=digest).exists():
            raise Problem(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                f"Another request with this Idempotency-Key has published the message {published.id} of the topic "
                f"{published.topic}. Nothing was published. Send another key with another message.",
                id=str(published.id),
            )
    return published


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
                raise Problem(
                    HTTPStatus.CONFLICT,
                    f"The message {found.id} has the topic {found.topic} and the biz-id {found.biz_id}, and another payload. "
                    "Nothing was published. Use another biz-id for another fact.",
                    id=str(found.id),
                    index=index,
                )
    return published
