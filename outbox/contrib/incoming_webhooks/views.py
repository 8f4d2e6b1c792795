"""The view that a provider calls: what its requests must look like, and what is published for an event.

It answers 200 only after the event is committed; any other answer makes the provider repeat the request or show it as failed.
Nothing is stored for a request that is answered otherwise. Neither a body nor a secret is logged.

An event is stored by publishing it with `unique=True` and the provider's event id as the biz-id. So of any number of concurrent
requests with one event one is stored, and the others wait for its commit and find it. A repeated event that is no longer in
history is published again, with the same biz-id, and the inbox suppresses it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NoReturn

from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.dispatch import Signal
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.views.decorators.csrf import csrf_exempt
from django.views.generic import View

from exactly_once.bodies import read_body
from exactly_once.problems import Problem
from exactly_once.process.logs import escaping_logger
from exactly_once.telemetry.tracing import Cause, caused_by
from exactly_once.wire.text import why_no_topic, why_unfit
from outbox.api import PublishedMessage, contradicts, publish
from outbox.conf import outbox_options
from outbox.contrib.incoming_webhooks.signatures import InvalidSignature, Verify
from outbox.errors import InvalidMessage, PayloadTooLarge
from outbox.store.dialect import database_of

logger = escaping_logger(__name__)

conflicting_event = Signal()
"""An event has the id of an earlier one and different content. It was answered with 409 and not stored. Arguments: `topic`,
`biz_id`, `message_id` of the earlier one. Sent after the transaction, with `send_robust`: an error in a receiver is logged. It
is for metrics and alerts only: it is not guaranteed, so no effect may depend on it."""


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

    def store(self, body: bytes, headers: Mapping[str, str]) -> tuple[PublishedMessage, bool]:
        """Publish the event of a verified request in a transaction of its own, and return after its commit.

        A repeated event changes nothing.

        Returns:
            the event's message, or an earlier one with its id; and whether that has different content.

        Raises:
            Unreadable, PayloadTooLarge: there is no event, or it cannot be published.
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
        with transaction.atomic(using=self.using, durable=True), caused_by(Cause(correlation_id=correlation_id)):
            try:
                published = publish(self.topic, payload, biz_id=biz_id, unique=True, using=self.using)
            except PayloadTooLarge:
                raise
            except InvalidMessage:
                raise Unreadable("its payload cannot be published") from None
            return published, contradicts(published, payload, using=self.using)

    def _value(self, argument: str, callback: Callback) -> Any:
        read = getattr(self, argument)
        if isinstance(read, str):
            return _at(callback.payload, read)
        try:
            return read(callback)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Unreadable(f"{argument} raised {type(error).__name__}") from None


class WebhookView(View):
    """Verifies, stores and publishes the events of a provider. Only POST; no CSRF token, session or login is needed.

    200: the event is committed, now or by an earlier request. 400: the signed body is not an event. 401: the signature is
    invalid. 405: not POST. 409: an earlier event has this id and different content. 411: under WSGI, the body has no
    Content-Length. 413: it is larger than `OUTBOX["BODY_LIMIT_BYTES"]`; at most that much of it is read.
    """

    http_method_names = ["post"]  # noqa: RUF012 - as Django declares it
    endpoint: Endpoint = None  # type: ignore[assignment]  # as_view() sets it

    @classmethod
    def as_view(  # type: ignore[override]  # the arguments by name, so that a wrong one is found
        cls,
        *,
        topic: str,
        verify: Verify,
        biz_id: str | Read,
        correlate: str | Read | None = None,
        payload: str | Read | None = None,
        using: str | None = None,
    ) -> Callable[..., HttpResponseBase]:
        """The view, for a URLconf.

        Args:
            topic: of the messages; one per provider, because its event ids are unique among its own events only.
            verify: a verifier, such as `Stripe(secret)`, or a function of the raw body and the headers that returns True for a
                request of the provider.
            biz_id: where the provider's event id is: the path of a field in the body, such as "event.id", or a function of the
                `Callback`, such as `header("webhook-id")`. The id becomes the message's biz-id.
            correlate: where the correlation id is, in the same way; it becomes the message's correlation id. An event without
                one is published without it.
            payload: which part of the body is published, in the same way. Default: all of it. Only this part has to be the
                same when the provider repeats an event.
            using: the database alias of the outbox.

        Raises:
            ImproperlyConfigured: an argument cannot be used.
        """
        alias = database_of(using)
        endpoint = Endpoint(topic=topic, verify=verify, biz_id=biz_id, correlate=correlate, payload=payload, using=alias)
        view = super().as_view(endpoint=endpoint)
        # The event has a transaction of its own, also with ATOMIC_REQUESTS.
        return csrf_exempt(login_not_required(transaction.non_atomic_requests(using=alias)(view)))

    def post(self, request: HttpRequest) -> HttpResponse:
        endpoint = self.endpoint
        try:
            return _stored(endpoint, read_body(request, outbox_options().BODY_LIMIT_BYTES), request.headers)
        except Problem as problem:
            return _refused(endpoint, problem.status, problem.detail)
        except PayloadTooLarge:
            return _refused(endpoint, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the body is too large")
        except InvalidSignature as error:
            return _refused(endpoint, HTTPStatus.UNAUTHORIZED, str(error), "the signature is invalid")
        except Unreadable as error:
            return _refused(endpoint, HTTPStatus.BAD_REQUEST, str(error))


def _stored(endpoint: Endpoint, body: bytes, headers: Mapping[str, str]) -> HttpResponse:
    if endpoint.verify(body, headers) is not True:
        raise InvalidSignature("verify did not return True")
    message, conflicts = endpoint.store(body, headers)
    if conflicts:
        logger.error(
            "webhook: topic %s: refused the event %r with 409, because the message %s has the same event id and different "
            "content; compare both at the provider",
            *(endpoint.topic, message.biz_id, message.id),
        )
        given = {"topic": endpoint.topic, "biz_id": message.biz_id, "message_id": str(message.id)}
        conflicting_event.send_robust(WebhookView, **given)
        return _answer(HTTPStatus.CONFLICT, "an earlier event has this id and different content")
    return _answer(HTTPStatus.OK, "stored" if message.created else "known")


def _refused(endpoint: Endpoint, status: HTTPStatus, reason: str, answer: str = "") -> HttpResponse:
    logger.warning("webhook: topic %s: refused a request with %d: %s", endpoint.topic, status, reason)
    return _answer(status, answer or reason)


def _answer(status: HTTPStatus, text: str) -> HttpResponse:
    return HttpResponse(f"{text}\n", status=status, content_type="text/plain; charset=utf-8")


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
