"""The messages that the code under test has published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from exactly_once.testing.matching import IsMeant, Messages, with_values
from outbox.models import OutboxMessage
from outbox.store.dialect import database_of


@dataclass(frozen=True, kw_only=True)
class CapturedMessage:
    """A message in the outbox of the test's database.

    Attributes:
        id: the message id.
        payload: decoded, as a consumer gets it: a Decimal or a UUID is text. Bytes if the body is not JSON.
        state: "ready", "scheduled", "published" and so on; see `outbox.models.State`.
        attempts: failed attempts to publish it; for a prepared message the number of checks.
        last_error: why the latest attempt failed, or "".
        deliver_at: the instant that it was delayed to, or None.
        due_at: when the relay may take it next.
        correlation_id: the id of the first message of its chain.
        causation_id: the id of the message whose handler published it, or "".
    """

    id: str
    topic: str
    payload: Any
    biz_id: str
    key: str
    headers: Mapping[str, Any]
    priority: int
    state: str
    attempts: int
    last_error: str
    created_at: datetime
    deliver_at: datetime | None
    due_at: datetime
    expires_at: datetime | None
    correlation_id: str
    causation_id: str


def published(topic: str | None = None, *, using: str | None = None, **expected: Any) -> list[CapturedMessage]:
    """The messages that `publish()` and `prepare()` have written, in the order of writing and in any state.

    Args:
        topic: only messages of this topic.
        using: the database alias of the outbox.
        expected: only messages with these values. A name is an attribute of `CapturedMessage`, or a path into one:
            `payload__order="1001"`, `payload__items__0__sku="pen"`, `headers__tenant="acme"`. A value is compared with `==`; in
            a payload also in its JSON form, so that a UUID equals its text.

    Raises:
        TypeError: a name is not an attribute of `CapturedMessage`.
    """
    return _MESSAGES.found(_MESSAGES.all(database_of(using)), _is_of(topic), expected)


def assert_published(topic: str, *, count: int = 1, using: str | None = None, **expected: Any) -> CapturedMessage:
    """Assert that exactly `count` messages of `topic` were published with these values; return the first of them.

    Args:
        count: at least 1.
        using, expected: as for `published`.

    Raises:
        AssertionError: another number was published; its message lists the messages in the outbox.
        TypeError: as `published`.
    """
    __tracebackhide__ = True
    if count < 1:
        raise ValueError(f"count is {count}: use assert_nothing_published() for none.")
    _assert_count(count, topic, using, expected)
    return published(topic, using=using, **expected)[0]


def assert_nothing_published(topic: str | None = None, *, using: str | None = None, **expected: Any) -> None:
    """Assert that no message was published, or none of `topic`, or none with these values.

    Args:
        topic, using, expected: as for `published`.

    Raises:
        AssertionError: there are such messages; its message lists the messages in the outbox.
        TypeError: as `published`.
    """
    __tracebackhide__ = True
    _assert_count(0, topic, using, expected)


_MESSAGES = Messages(
    "outbox", CapturedMessage, OutboxMessage, due="available_at", words=("topic", "state"), values=("last_error",)
)


def _is_of(topic: str | None) -> IsMeant:
    return lambda message: topic in {None, message.topic}


def _assert_count(count: int, topic: str | None, using: str | None, expected: Mapping[str, Any]) -> None:
    __tracebackhide__ = True
    alias = database_of(using)
    messages = _MESSAGES.all(alias)
    found = len(_MESSAGES.found(messages, _is_of(topic), expected))
    if found != count:
        described = (f" on the topic {topic!r}" if topic else "") + with_values(expected)
        raise AssertionError(
            f"{found or 'No'} {_messages(found)} published{described} on {alias!r}, {count or 'none'} expected.\n"
            f"{_MESSAGES.listed(messages, _is_of(topic), expected)}"
        )


def _messages(count: int) -> str:
    return "message was" if count in {0, 1} else "messages were"
