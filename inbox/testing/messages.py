"""Messages for tests: how one is made, its wire format, and the states of those that the handlers under test have received."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import kombu
from django.core.serializers.json import DjangoJSONEncoder

from exactly_once.process.clock import utcnow
from exactly_once.testing.matching import Meant, Messages, on_topic
from exactly_once.wire.envelope import JSON, Envelope
from exactly_once.wire.identity import new_message_id
from exactly_once.wire.payloads import plain
from exactly_once.wire.text import encoded
from inbox.handlers.message import Message
from inbox.models import InboxMessage
from inbox.states import State
from inbox.testing.observing import registered

_SOURCE = "/tests"
_PAYLOADS = DjangoJSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
What = str | Callable[..., Any] | None
"""A topic, or a handler's function, or anything."""


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
    return json.loads(_PAYLOADS.encode(plain(value, _PAYLOADS)))


def envelope_of(message: Message) -> Envelope:
    """The envelope of the message, with its payload serialised."""
    same = ("id", "topic", "created_at", "biz_id", "key", "correlation_id", "causation_id", "headers")
    body = encoded(_PAYLOADS.encode(message.raw))
    return Envelope(source=_SOURCE, body=body, **{name: getattr(message, name) for name in same})


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


@dataclass(frozen=True, kw_only=True)
class ReceivedMessage:
    """A message of one handler in the inbox of the test's database.

    Attributes:
        handler: the name of the handler.
        id: the message id.
        payload: decoded, as the handler gets it. Bytes if the body is not JSON.
        state: "done", "retrying", "dead" and so on; see `inbox.states.State`.
        attempts: the number of counted attempts. RetryLater does not count.
        duplicates: deliveries after the first, whose effect was suppressed.
        redeliveries: duplicates that the broker redelivered.
        conflicts: duplicates with different content.
        last_error: why the latest attempt failed, or "".
        due_at: when it is due next, or None.
        correlation_id: the id of the first message of its chain.
        causation_id: the id of the message whose handler published it, or "".
    """

    handler: str
    id: str
    topic: str
    payload: Any
    biz_id: str
    key: str
    headers: Mapping[str, Any]
    state: str
    attempts: int
    duplicates: int
    redeliveries: int
    conflicts: int
    last_error: str
    created_at: datetime | None
    received_at: datetime
    due_at: datetime | None
    correlation_id: str
    causation_id: str


def handled(what: What = None, *, using: str | None = None, **expected: Any) -> list[ReceivedMessage]:
    """The messages whose effect is committed, in the order of their arrival; once per handler.

    Args:
        what: only messages of this topic, or of the handler with this function.
        using: the database alias of the inbox.
        expected: only messages with these values. A name is an attribute of `ReceivedMessage`, or a path into one:
            `payload__order="1001"`, `handler="orders.reserve_stock"`, `duplicates=1`. A value is compared with `==`; in a
            payload also in its JSON form, so that a UUID equals its text.

    Raises:
        LookupError: the function is not a handler.
        TypeError: a name is not an attribute of `ReceivedMessage`.
    """
    return _MESSAGES.found(_meant(what), using, {"state": State.DONE.value, **expected})


def dead(what: What = None, *, using: str | None = None, **expected: Any) -> list[ReceivedMessage]:
    """The dead letters, in the order of their arrival: out of attempts, rejected, or refused.

    Args, Raises: as for `handled`.
    """
    return _MESSAGES.found(_meant(what), using, {"state": State.DEAD.value, **expected})


def assert_handled(what: What, *, count: int = 1, using: str | None = None, **expected: Any) -> ReceivedMessage:
    """Assert that exactly `count` messages with these values were handled; return the first of them.

    A message that several handlers take counts once for each of them.

    Args:
        count: at least 1.
        what, using, expected: as for `handled`.

    Raises:
        AssertionError: another number was handled; the text lists the messages in the inbox.
        LookupError, TypeError: as for `handled`.
    """
    __tracebackhide__ = True
    if count < 1:
        raise ValueError(f"count is {count}: it must be 1 or more. For none, assert that handled() is empty.")
    return _MESSAGES.counted(count, "handled", _meant(what), using, expected, state=State.DONE.value)[0]


def assert_duplicate(what: What, *, count: int = 1, using: str | None = None, **expected: Any) -> ReceivedMessage:
    """Assert that exactly one message has these values, and that exactly `count` duplicates of it were suppressed; return it.

    Args:
        count: of duplicates; at least 1.
        what, using, expected: as for `handled`; the message may be in any state.

    Raises:
        AssertionError: there is no such message, or more than one, or another number of duplicates; the text lists
            the messages in the inbox.
        LookupError, TypeError: as for `handled`.
    """
    __tracebackhide__ = True
    if count < 1:
        raise ValueError(f"count is {count}: it must be 1 or more. For none, use assert_handled(..., duplicates=0).")
    meant = _meant(what)
    (message,) = _MESSAGES.counted(1, "received", meant, using, expected)
    if message.duplicates != count:
        what = "duplicate suppressed"
        raise _MESSAGES.unexpected(message.duplicates, what, count, meant, using, expected, duplicates=count)
    return message


_MESSAGES = Messages(
    "inbox",
    ReceivedMessage,
    InboxMessage,
    due="next_attempt_at",
    words=("handler", "topic", "state"),
    values=("duplicates", "last_error"),
)


def _meant(what: What) -> Meant:
    if what is None or isinstance(what, str):
        return on_topic(what)
    name = registered(what).name
    return Meant(lambda message: message.handler == name, f" by {name}")
