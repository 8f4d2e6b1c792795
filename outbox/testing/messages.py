"""The messages that the code under test has published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import DEFAULT_DB_ALIAS

from exactly_once.sql.rows import value_of
from exactly_once.testing.matching import decoded, line_of, listed, matching, require_known, short, with_values
from outbox.models import OutboxMessage


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


def published(topic: str | None = None, *, using: str = DEFAULT_DB_ALIAS, **expected: Any) -> list[CapturedMessage]:
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
    return _matching(_all(using), topic, expected)


def assert_published(topic: str, *, count: int = 1, using: str = DEFAULT_DB_ALIAS, **expected: Any) -> CapturedMessage:
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


def assert_nothing_published(topic: str | None = None, *, using: str = DEFAULT_DB_ALIAS, **expected: Any) -> None:
    """Assert that no message was published, or none of `topic`, or none with these values.

    Args:
        topic, using, expected: as for `published`.

    Raises:
        AssertionError: there are such messages; its message lists the messages in the outbox.
        TypeError: as `published`.
    """
    __tracebackhide__ = True
    _assert_count(0, topic, using, expected)


def _all(using: str) -> list[CapturedMessage]:
    return [
        value_of(
            CapturedMessage,
            row,
            id=str(row.message_id),
            payload=decoded(bytes(row.body)),
            state=str(row.state),
            due_at=row.available_at,
        )
        for row in OutboxMessage.objects.using(using).order_by("pk")
    ]


def _matching(messages: Sequence[CapturedMessage], topic: str | None, expected: Mapping[str, Any]) -> list[CapturedMessage]:
    require_known(CapturedMessage, expected)
    return matching([message for message in messages if topic in {None, message.topic}], expected)


def _assert_count(count: int, topic: str | None, using: str, expected: Mapping[str, Any]) -> None:
    __tracebackhide__ = True
    messages = _all(using)
    found = len(_matching(messages, topic, expected))
    if found != count:
        described = (f" on the topic {topic!r}" if topic else "") + with_values(expected)
        shown = listed(messages, _line, expected, place="outbox", is_meant=lambda message: topic in {None, message.topic})
        raise AssertionError(
            f"{found or 'No'} {_messages(found)} published{described} on {using!r}, {count or 'none'} expected.\n{shown}"
        )


def _messages(count: int) -> str:
    return "message was" if count in {0, 1} else "messages were"


def _line(message: CapturedMessage) -> str:
    values = {
        "biz_id": "" if message.biz_id == message.id else message.biz_id,
        "key": message.key,
        "headers": message.headers,
        "last_error": message.last_error,
    }
    return f"{line_of([message.topic, message.state], values)} payload={short(message.payload)}"
