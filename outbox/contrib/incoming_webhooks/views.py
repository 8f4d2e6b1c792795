"""The view that a provider calls.

It answers 200 only after the event is committed; any other answer makes the provider repeat the request or show it as failed.
Nothing is stored for a request that is answered otherwise. Neither a body nor a secret is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus

from django.contrib.auth.decorators import login_not_required
from django.db import transaction
from django.dispatch import Signal
from django.http import HttpRequest, HttpResponse, UnreadablePostError
from django.http.response import HttpResponseBase
from django.views.decorators.csrf import csrf_exempt
from django.views.generic import View

from exactly_once.process.logs import escaping_logger
from outbox.conf import outbox_options
from outbox.contrib.incoming_webhooks.endpoint import Endpoint, Read, Unreadable
from outbox.contrib.incoming_webhooks.signatures import InvalidSignature, Verify
from outbox.errors import PayloadTooLarge
from outbox.store.dialect import database_of

logger = escaping_logger(__name__)

conflicting_event = Signal()
"""An event has the id of an earlier one and different content. It was answered with 409 and not stored. Arguments: `topic`,
`biz_id`, `message_id` of the earlier one. Sent after the transaction, with `send_robust`: an error in a receiver is logged. It
is for metrics and alerts only: it is not guaranteed, so no effect may depend on it."""


class WebhookView(View):
    """Verifies, stores and publishes the events of a provider. Only POST; no CSRF token, session or login is needed.

    200: the event is committed, now or by an earlier request. 400: the signed body is not an event. 401: the signature is
    invalid. 405: not POST. 409: an earlier event has this id and different content. 413: the body is larger than
    `OUTBOX["BODY_LIMIT_BYTES"]`; at most that much of it is read.
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
            return _stored(endpoint, _read(request), request.headers)
        except PayloadTooLarge:
            return _refused(endpoint, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the body is too large")
        except InvalidSignature as error:
            return _refused(endpoint, HTTPStatus.UNAUTHORIZED, str(error), "the signature is invalid")
        except Unreadable as error:
            return _refused(endpoint, HTTPStatus.BAD_REQUEST, str(error))


def _stored(endpoint: Endpoint, body: bytes, headers: Mapping[str, str]) -> HttpResponse:
    if endpoint.verify(body, headers) is not True:
        raise InvalidSignature("verify did not return True")
    event = endpoint.read(body, headers)
    message, conflicts = endpoint.store(event)
    if conflicts:
        logger.error(
            "webhook: topic %s: refused the event %r with 409, because the message %s has the same event id and different "
            "content; compare both at the provider",
            *(endpoint.topic, event.biz_id, message.id),
        )
        given = {"topic": endpoint.topic, "biz_id": event.biz_id, "message_id": str(message.id)}
        conflicting_event.send_robust(WebhookView, **given)
        return _answer(HTTPStatus.CONFLICT, "an earlier event has this id and different content")
    return _answer(HTTPStatus.OK, "stored" if message.created else "known")


def _read(request: HttpRequest) -> bytes:
    """The raw body, of which at most one byte more than the limit is read.

    Raises:
        PayloadTooLarge: it is larger than the limit.
        Unreadable: the client has closed the connection.
    """
    limit = outbox_options().BODY_LIMIT_BYTES
    announced = request.headers.get("Content-Length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise PayloadTooLarge
    try:
        body = bytes(request.read(limit + 1))
    except UnreadablePostError:
        raise Unreadable("the client closed the connection") from None
    if len(body) > limit:
        raise PayloadTooLarge
    return body


def _refused(endpoint: Endpoint, status: HTTPStatus, reason: str, answer: str = "") -> HttpResponse:
    logger.warning("webhook: topic %s: refused a request with %d: %s", endpoint.topic, status, reason)
    return _answer(status, answer or reason)


def _answer(status: HTTPStatus, text: str) -> HttpResponse:
    return HttpResponse(f"{text}\n", status=status, content_type="text/plain; charset=utf-8")
