"""Sending one message to one endpoint: the function of the endpoint's handler, under a lease and outside any transaction.

A request is sent at least once. If the process dies between the answer and the commit of the row, it is sent again, with the
same id and the same body.

A request is signed by the Standard Webhooks specification with a symmetric secret (`v1`). The receiver verifies the id, the
time and the body, as `outbox.contrib.incoming_webhooks.StandardWebhooks` does. The id is the same in every attempt, so the
receiver deduplicates on it. The time is that of the attempt.
"""

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from email.utils import parsedate_to_datetime
from functools import partial, update_wrapper
from http import HTTPStatus

from exactly_once.process.clock import utcnow
from exactly_once.wire.identity import uuid_in
from exactly_once.wire.text import encoded, printable
from inbox.conf import inbox_options
from inbox.contrib.outgoing_webhooks import endpoints
from inbox.contrib.outgoing_webhooks.addresses import networks, shown
from inbox.contrib.outgoing_webhooks.fanning_out import TEST, handler_name
from inbox.contrib.outgoing_webhooks.models import PREFIX, Endpoint, State
from inbox.contrib.outgoing_webhooks.posting import SUCCESS, Answer, NoAnswer, post
from inbox.errors import Reject, RetryLater
from inbox.handlers.handler import Handler
from inbox.handlers.kinds import Lease
from inbox.handlers.message import Message

_HEADERS = {"Content-Type": "application/json", "User-Agent": "django-exactly-once"}
_TIMEOUT, _LEASE = timedelta(seconds=15), timedelta(minutes=1)
_NOT_NOW = timedelta(seconds=1)
"""Within this time, a process reads that the endpoint is not active any more."""
_MAY_ASK_TO_WAIT = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
_REDIRECTS = range(300, 400)
_SHOWN = 500


class ErrorAnswer(Exception):
    """The endpoint has answered with an error."""


@dataclass(frozen=True, kw_only=True)
class _Request(Lease):
    def has_around(self, message: Message) -> bool:
        return message.topic != TEST  # no publisher has set its headers


def handler_of(alias: str, endpoint: Endpoint) -> Handler:
    """The handler of the messages to this endpoint. Until a request has succeeded again, it runs one at a time."""
    return Handler(
        name=handler_name(endpoint),
        topics=(),
        function=update_wrapper(partial(_deliver, alias, endpoint.pk), _deliver),
        biz_id=None,
        using=alias,
        kind=_Request(duration=_LEASE, limit=2 * _LEASE),
        concurrency=1 if endpoint.failures else endpoint.concurrency,
    )


def _deliver(alias: str, pk: int, message: Message) -> None:
    endpoint = endpoints.current(alias, pk)
    if endpoint is None:
        raise Reject("Its endpoint does not exist any more.")
    if endpoint.state != State.ACTIVE:
        raise RetryLater(_NOT_NOW, f"the endpoint {endpoint.name} is {endpoint.get_state_display().lower()}")
    body = encoded(json.dumps(message.payload, ensure_ascii=False, separators=(",", ":")))
    headers = {**_HEADERS, **_signature(_webhook_id(message), body, endpoints.secrets_of(endpoint))}
    try:
        answer = post(endpoint.url, body, headers, timeout=_TIMEOUT, private=networks(inbox_options().WEBHOOK_NETWORKS))
    except NoAnswer as error:
        endpoints.failed(alias, endpoint, str(error))
        raise
    _settle(alias, endpoint, answer)


def _webhook_id(message: Message) -> str:
    """The id on which receivers deduplicate: that of the message if it is a UUID, as those of the outbox are.

    Another producer's id may be missing, unfit for a header, or unique for that producer only (CloudEvents 1.0.2). Then it is a
    digest of what the inbox deduplicates on.
    """
    found = uuid_in(message.id)
    return str(found) if found else hashlib.sha256(f"{message.topic}\n{message.biz_id}".encode()).hexdigest()


def _signature(webhook_id: str, body: bytes, secrets: Sequence[str]) -> dict[str, str]:
    """The headers `webhook-id`, `webhook-timestamp` and `webhook-signature`, which has a signature by each secret."""
    timestamp = str(int(utcnow().timestamp()))
    signed = b".".join([webhook_id.encode(), timestamp.encode(), body])
    keys = [base64.b64decode(secret.removeprefix(PREFIX)) for secret in secrets]
    signatures = [base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in keys]
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }


def _settle(alias: str, endpoint: Endpoint, answer: Answer) -> None:
    """
    Raises:
        RetryLater: the endpoint has asked for a pause.
        Reject: the endpoint wants no more messages.
        ErrorAnswer: any other error.
    """
    if answer.status in SUCCESS:
        endpoints.succeeded(alias, endpoint)
        return
    reason = _described(endpoint, answer)
    if answer.status == HTTPStatus.GONE:
        endpoints.gone(alias, endpoint, reason)
        raise Reject(f"{reason} The endpoint is disabled.")
    if answer.status in _MAY_ASK_TO_WAIT and (pause := retry_after(answer.headers)):
        endpoints.asked_to_wait(alias, endpoint, pause, reason)
        raise RetryLater(pause, reason)
    endpoints.failed(alias, endpoint, reason)
    raise ErrorAnswer(reason)


def retry_after(headers: Mapping[str, str]) -> timedelta | None:
    """The pause of the header Retry-After (RFC 9110, 10.2.3): a number of seconds or a date, at most `LONGEST_PAUSE`.

    Args:
        headers: by their names in lower case.
    """
    given = headers.get("retry-after", "").strip()
    try:
        if given.isdecimal() and given.isascii():
            pause = timedelta(seconds=min(int(given), endpoints.LONGEST_PAUSE.total_seconds()))
        else:
            pause = parsedate_to_datetime(given) - utcnow()
    except (TypeError, ValueError, OverflowError):
        # Also for a number with thousands of digits, and a date with such a year or time zone.
        return None
    return min(max(pause, _NOT_NOW), endpoints.LONGEST_PAUSE)


def _described(endpoint: Endpoint, answer: Answer) -> str:
    beginning = " ".join(printable(answer.beginning.decode("utf-8", "replace"), _SHOWN).split())
    redirect = " A redirect is not followed: change the URL of the endpoint." if answer.status in _REDIRECTS else ""
    return f"POST {shown(endpoint.url)} was answered with {answer.status}{f': {beginning}' if beginning else '.'}{redirect}"
