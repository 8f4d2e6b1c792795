"""The messages that the code under test has published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from exactly_once.testing.matching import Messages, on_topic
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
    return _MESSAGES.found(on_topic(topic), using, expected)


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
    return _MESSAGES.counted(count, "published", on_topic(topic), using, expected)[0]


def assert_nothing_published(topic: str | None = None, *, using: str | None = None, **expected: Any) -> None:
    """Assert that no message was published, or none of `topic`, or none with these values.

    Args:
        topic, using, expected: as for `published`.

    Raises:
        AssertionError: there are such messages; its message lists the messages in the outbox.
        TypeError: as `published`.
    """
    __tracebackhide__ = True
    _MESSAGES.counted(0, "published", on_topic(topic), using, expected)


_MESSAGES = Messages(
    "outbox", CapturedMessage, OutboxMessage, due="available_at", words=("topic", "state"), values=("last_error",)
)
