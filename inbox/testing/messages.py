"""Messages for tests, and their wire format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import kombu
from django.core.serializers.json import DjangoJSONEncoder

from exactly_once.process.clock import utcnow
from exactly_once.wire.envelope import JSON, Envelope
from exactly_once.wire.identity import new_message_id
from inbox.handlers.message import Message

_SOURCE = "/tests"
_PAYLOADS = DjangoJSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def make_message(
    topic: str,
    payload: Any,
    *,
    id: str = "",  # noqa: A002 - the name of the attribute
    biz_id: str = "",
    key: str = "",
    headers: Mapping[str, Any] | None = None,
    created_at: datetime | None = None,
    attempt: int = 1,
    correlation_id: str = "",
    causation_id: str = "",
    fence: int = 0,
) -> Message:
    """A message as a handler gets it.

    Args:
        payload: as for `publish()`. The handler gets it as decoded JSON: a Decimal or a date is text.
        id: default: a new one.
        biz_id: default: the id.
        created_at: default: now.
        attempt: counted from 1; from 2 on the message is `redelivered`. Only `run_handler` uses it and `fence`.
        correlation_id: default: the id.

    Raises:
        TypeError, ValueError: the payload is not JSON.
    """
    id = id or str(new_message_id())  # noqa: A001
    return Message(
        id=id,
        topic=topic,
        key=key,
        biz_id=biz_id or id,
        payload=through_json(payload),
        headers=dict(headers or {}),
        created_at=created_at or utcnow(),
        attempt=attempt,
        redelivered=attempt > 1,
        correlation_id=correlation_id or id,
        causation_id=causation_id,
        fence=fence,
    )


def through_json(value: Any) -> Any:
    return json.loads(_PAYLOADS.encode(value))


def envelope_of(message: Message) -> Envelope:
    """The envelope of the message, with its payload serialised."""
    return Envelope(
        id=message.id,
        topic=message.topic,
        source=_SOURCE,
        created_at=message.created_at,
        biz_id=message.biz_id,
        key=message.key,
        correlation_id=message.correlation_id,
        causation_id=message.causation_id,
        body=_PAYLOADS.encode(message.payload).encode(),
        headers=message.headers,
    )


def as_delivered(message: Message, *, redelivered: bool) -> kombu.Message:
    """The message as kombu passes it to a consumer."""
    envelope = envelope_of(message)
    return kombu.Message(
        body=envelope.body,
        delivery_tag=1,
        content_type=JSON,
        content_encoding="utf-8",
        delivery_info={"redelivered": redelivered, "routing_key": message.topic},
        properties={"message_id": message.id, "type": message.topic},
        headers=envelope.to_headers(),
    )
