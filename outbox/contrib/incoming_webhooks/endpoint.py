"""One webhook: what its requests must look like, and what is published for an event.

An event is stored by publishing it with `unique=True` and the provider's event id as the biz-id. So of any number of concurrent
requests with one event one is stored, and the others wait for its commit and find it. A repeated event that is no longer in
history is published again, with the same biz-id, and the inbox suppresses it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction

from exactly_once.telemetry.tracing import Cause, caused_by
from exactly_once.wire.text import why_no_topic, why_unfit
from outbox.api import PublishedMessage, publish
from outbox.contrib.incoming_webhooks.signatures import Verify
from outbox.errors import InvalidMessage, PayloadTooLarge
from outbox.store.unique import has_payload


class Unreadable(Exception):
    """The signed request is not an event. The reason contains nothing of the body."""


@dataclass(frozen=True, kw_only=True)
class Callback:
    """A verified request.

    Attributes:
        payload: the body, read as JSON.
        headers: of the request; their names are case-insensitive.
    """

    payload: Any = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)


Read = Callable[[Callback], Any]


def header(name: str) -> Read:
    """The value of a header, for `biz_id` and `correlate`: `header("webhook-id")`."""
    return lambda callback: callback.headers.get(name)


@dataclass(frozen=True, kw_only=True)
class Event:
    """What is published for a callback.

    Attributes:
        biz_id: the provider's event id.
        correlation_id: "" if the event has none.
        payload: of the message.
    """

    biz_id: str
    correlation_id: str
    payload: Any = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The arguments of `WebhookView.as_view`, see there.

    Raises:
        ImproperlyConfigured: one of them cannot be used.
    """

    topic: str
    verify: Verify
    biz_id: str | Read
    correlate: str | Read | None
    payload: str | Read | None
    using: str

    def __post_init__(self) -> None:
        if not _is_topic(self.topic):
            self._refuse("topic", "it must be a topic that publish() accepts")
        if not _is_function(self.verify):
            self._refuse("verify", "it must be a verifier, such as Stripe(secret), or a function of the body and the headers")
        for name in ("biz_id", "correlate", "payload"):
            value = getattr(self, name)
            is_path = isinstance(value, str) and all(value.split("."))
            if not (is_path or callable(value) or (value is None and name != "biz_id")):
                self._refuse(name, 'it must be the path of a field, such as "event.id", or a function of a Callback')
        if self.using not in connections:
            self._refuse("using", f"DATABASES has: {', '.join(connections)}")

    def _refuse(self, argument: str, remedy: str) -> NoReturn:
        # Not the value of `verify`, which may be a secret.
        value = "" if argument == "verify" else f": {getattr(self, argument)!r}"
        raise ImproperlyConfigured(f"WebhookView.as_view(): {argument} cannot be used{value}; {remedy}.")

    def read(self, body: bytes, headers: Mapping[str, str]) -> Event:
        """The event in a verified request.

        Raises:
            Unreadable: there is none.
        """
        try:
            payload = json.loads(body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise Unreadable("the body is not JSON") from None
        callback = Callback(payload=payload, headers=headers)
        biz_id, correlation_id = _name("biz_id", self._value("biz_id", callback)), ""
        if self.correlate is not None and (found := self._value("correlate", callback)) is not None:
            correlation_id = _name("correlate", found)
        if self.payload is not None and (payload := self._value("payload", callback)) is None:
            raise Unreadable("payload finds nothing to publish")
        return Event(biz_id=biz_id, correlation_id=correlation_id, payload=payload)

    def store(self, event: Event) -> tuple[PublishedMessage, bool]:
        """Publish the event in a transaction of its own, and return after its commit. A repeated event changes nothing.

        Returns:
            the event's message, or an earlier one with its id; and whether that has different content.

        Raises:
            Unreadable, PayloadTooLarge: it cannot be published.
        """
        with transaction.atomic(using=self.using, durable=True), caused_by(Cause(correlation_id=event.correlation_id)):
            try:
                published = publish(self.topic, event.payload, biz_id=event.biz_id, unique=True, using=self.using)
            except PayloadTooLarge:
                raise
            except InvalidMessage:
                raise Unreadable("its payload cannot be published") from None
            return published, not (published.created or has_payload(self.using, published.id, event.payload))

    def _value(self, argument: str, callback: Callback) -> Any:
        read = getattr(self, argument)
        if isinstance(read, str):
            return _at(callback.payload, read)
        try:
            return read(callback)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Unreadable(f"{argument} raised {type(error).__name__}") from None


def _is_topic(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and not why_no_topic(value)


def _is_function(value: object) -> bool:
    """A class is callable, too: a verifier without its secret."""
    return callable(value) and not isinstance(value, type)


def _at(payload: Any, path: str) -> Any:
    """The value at a path of field names; None if a field is missing."""
    for name in path.split("."):
        if not isinstance(payload, dict):
            return None
        payload = payload.get(name)
    return payload


def _name(argument: str, value: object) -> str:
    text = str(value) if type(value) is int else value
    if not isinstance(text, str) or not text.strip():
        raise Unreadable(f"{argument} finds no text and no whole number")
    if reason := why_unfit(text):
        raise Unreadable(f"{argument} cannot be used: {reason}")
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
