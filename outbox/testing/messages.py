"""The messages that the code under test has published."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.db import DEFAULT_DB_ALIAS

from outbox.models import OutboxMessage

_SHOWN_MESSAGES = 20
_SHOWN_LENGTH = 300


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


def decoded(body: bytes) -> Any:
    """The payload in `body`; the bytes if they are not JSON, as in another protocol."""
    try:
        return json.loads(body)
    except ValueError:
        return body


def _all(using: str) -> list[CapturedMessage]:
    return [
        CapturedMessage(
            id=str(row.message_id),
            topic=row.topic,
            payload=decoded(bytes(row.body)),
            biz_id=row.biz_id,
            key=row.key,
            headers=row.headers,
            priority=row.priority,
            state=str(row.state),
            attempts=row.attempts,
            last_error=row.last_error,
            created_at=row.created_at,
            deliver_at=row.deliver_at,
            due_at=row.available_at,
            expires_at=row.expires_at,
            correlation_id=row.correlation_id,
            causation_id=row.causation_id,
        )
        for row in OutboxMessage.objects.using(using).order_by("pk")
    ]


def _matching(messages: Sequence[CapturedMessage], topic: str | None, expected: Mapping[str, Any]) -> list[CapturedMessage]:
    _require_known(expected)
    return [message for message in messages if topic in {None, message.topic} and not _differences(message, expected)]


def _assert_count(count: int, topic: str | None, using: str, expected: Mapping[str, Any]) -> None:
    __tracebackhide__ = True
    messages = _all(using)
    found = len(_matching(messages, topic, expected))
    if found != count:
        raise AssertionError(
            f"{found or 'No'} {_messages(found)} published{_described(topic, expected)} on {using!r}, "
            f"{count or 'none'} expected.\n{_listed(messages, topic, expected)}"
        )


def _messages(count: int) -> str:
    return "message was" if count in {0, 1} else "messages were"


def _described(topic: str | None, expected: Mapping[str, Any]) -> str:
    with_values = ", ".join(f"{name}={value!r}" for name, value in expected.items())
    return (f" on the topic {topic!r}" if topic else "") + (f" with {with_values}" if with_values else "")


def _listed(messages: Sequence[CapturedMessage], topic: str | None, expected: Mapping[str, Any]) -> str:
    """All messages, one per line; those of the topic first, each with its differences."""
    if not messages:
        return "The outbox is empty."
    ordered = sorted(messages, key=lambda message: topic is not None and message.topic != topic)
    lines = [_line(message, topic, expected) for message in ordered[:_SHOWN_MESSAGES]]
    if len(ordered) > _SHOWN_MESSAGES:
        lines.append(f"  … and {len(ordered) - _SHOWN_MESSAGES} more")
    return "\n".join(["In the outbox:", *lines])


def _line(message: CapturedMessage, topic: str | None, expected: Mapping[str, Any]) -> str:
    shown = {
        "biz_id": "" if message.biz_id == message.id else message.biz_id,
        "key": message.key,
        "headers": message.headers,
        "last_error": message.last_error,
    }
    values = "".join(f" {name}={_short(value)}" for name, value in shown.items() if value)
    line = f"  {message.topic} {message.state}{values} payload={_short(message.payload)}"
    differences = _differences(message, expected) if topic in {None, message.topic} else []
    return line + "".join(f"\n      {difference}" for difference in differences)


def _differences(message: CapturedMessage, expected: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in expected.items():
        attribute, *path = name.split("__")
        try:
            actual = _follow(getattr(message, attribute), path)
        except LookupError:
            found.append(f"{name}: missing, expected {_short(value)}")
        else:
            if actual != value and not (attribute == "payload" and actual == _as_json(value)):
                found.append(f"{name}: {_short(actual)}, expected {_short(value)}")
    return found


def _follow(value: Any, path: Sequence[str]) -> Any:
    for name in path:
        if isinstance(value, Mapping):
            value = value[name]
        elif isinstance(value, list) and name.isdecimal():
            value = value[int(name)]
        else:
            raise LookupError(name)
    return value


def _as_json(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, cls=DjangoJSONEncoder))
    except (TypeError, ValueError):
        return value  # such as unittest.mock.ANY


def _require_known(expected: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(CapturedMessage)]
    for name in expected:
        attribute = name.split("__")[0]
        if attribute not in known:
            close = difflib.get_close_matches(attribute, known, n=1)
            remedy = f"Did you mean {close[0]!r}?" if close else f"A message has: {', '.join(known)}."
            raise TypeError(f"{name}: a message has no {attribute!r}. {remedy}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "…"
