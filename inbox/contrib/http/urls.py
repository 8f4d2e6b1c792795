"""The operations of the HTTP API, as URLs, and what clients send and get: read, acknowledge, extend, release.

path("api/inbox/", include("inbox.contrib.http.urls"))
"""

from __future__ import annotations

import exactly_once.console.http  # noqa: F401 - it says what to install, before the imports that need it

# isort: split
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

from django.http import HttpRequest
from pydantic import BaseModel, FailFast, Field

from exactly_once.console.http.frame import MAX_MESSAGES, Api, Body, Count, Duration, answers, client_of, require
from exactly_once.console.http.problems import unavailable
from exactly_once.problems import Problem
from exactly_once.wire.text import ERROR_LENGTH
from inbox.conf import inbox_options
from inbox.contrib.http import queries
from inbox.contrib.http.waiting import places_for, until_found
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.handlers.registry import registry
from inbox.transactions.running import DatabaseUnavailable

app_name = "inbox_http"
_BODY_LIMIT_BYTES = 1024 * 1024
"""Of requests, which contain no messages."""
_MAX_WAIT = timedelta(seconds=30)

Lease = Annotated[str, Field(pattern=r"^[0-9]{1,18}\.[0-9]{1,9}$")]
LeaseDuration = Annotated[Duration, Field(ge=timedelta(seconds=1), le=timedelta(hours=12))]


class Reading(Body):
    """How many messages to wait for, and for how long they are the client's."""

    max_messages: Count = 1
    wait: Duration = Field("0s", validate_default=True, description="How long to wait for the first message. 0: do not wait.")
    lease: LeaseDuration = Field(
        "60s", validate_default=True, description="Without an acknowledgement another client gets them after this."
    )


class Leases(Body):
    """The leases of messages, as they were read."""

    leases: Annotated[list[Lease], FailFast()] = Field(min_length=1)


class Extension(Leases):
    """Leases, and for how long the messages are the client's from now on."""

    lease: LeaseDuration = Field("60s", validate_default=True)


class Release(Leases):
    """Leases of messages that the client does not handle now."""

    delay: Duration | None = Field(
        None, description="Until another client gets them. Default: at once; after an error, as the subscription's retry says."
    )
    error: Annotated[str, Field(max_length=ERROR_LENGTH)] = Field(
        "", description="Why the attempt failed. Empty: it is not a failure, and does not count as an attempt."
    )


class LeasedMessage(BaseModel):
    """A message, and the lease that acknowledges it."""

    lease: str
    id: str = Field(description="The same whenever the message is read: the idempotency key of its effects.")
    topic: str
    biz_id: str
    key: str
    payload: Any
    headers: Mapping[str, Any]
    created_at: datetime | None
    attempt: int = Field(description="Counted from 1.")
    fence: int = Field(description="Greater than that of any earlier lease of this message.")
    correlation_id: str
    causation_id: str

    @classmethod
    def of(cls, lease: str, message: Message) -> LeasedMessage:
        return cls(lease=lease, **{name: getattr(message, name) for name in cls.model_fields if name != "lease"})


class LeasedMessages(BaseModel):
    """Empty if no message came in time."""

    messages: list[LeasedMessage]


class SettledLeases(BaseModel):
    """Each lease of the request is in one of the two lists."""

    settled: list[str] = Field(description="The request was done for them.")
    ended: list[str] = Field(
        description="They have ended, and nothing was changed: their messages are another client's, due again, or handled."
    )


api = Api(
    name=app_name,
    title="Inbox",
    description="Read the messages of a subscription, each under a lease, and acknowledge them.",
    options=lambda: inbox_options().http,
    body_limit=lambda: _BODY_LIMIT_BYTES,
    answered={DatabaseUnavailable: unavailable},
)


@api.post("/subscriptions/{name}/read", operation_id="read", response=answers({200: LeasedMessages}, 404, 429))
async def read(request: HttpRequest, name: str, how: Reading) -> LeasedMessages:
    """Read due messages, or wait for one. Each is the client's until its lease ends."""
    handler, options = _subscription(request, name), inbox_options()
    _require_at_most("max_messages", how.max_messages, MAX_MESSAGES)
    _require_at_most("wait", how.wait, _MAX_WAIT)
    leased = await until_found(
        partial(queries.claim, handler, how.max_messages, how.lease, options),
        alias=handler.using,
        wait=how.wait,
        longest_pause=options.POLL_INTERVAL,
        client=client_of(request).name,
        places=places_for(request, options.http),
    )
    return LeasedMessages(messages=[LeasedMessage.of(*each) for each in leased])


@api.post("/subscriptions/{name}/acknowledge", operation_id="acknowledge", response=answers({200: SettledLeases}, 404))
def acknowledge(request: HttpRequest, name: str, given: Leases) -> SettledLeases:
    """The messages are handled. Leases that have ended are named; the others are acknowledged. It may be repeated."""
    return _settled(queries.acknowledge(_subscription(request, name), _leases(given), inbox_options()))


@api.post("/subscriptions/{name}/extend", operation_id="extend", response=answers({200: SettledLeases}, 404))
def extend(request: HttpRequest, name: str, given: Extension) -> SettledLeases:
    """Keep the messages for longer. Leases that have ended are named; the others are extended."""
    return _settled(queries.extend(_subscription(request, name), _leases(given), given.lease))


@api.post("/subscriptions/{name}/release", operation_id="release", response=answers({200: SettledLeases}, 404))
def release(request: HttpRequest, name: str, given: Release) -> SettledLeases:
    """Give messages back, at once or after a delay; with an error, as a failed attempt, the last of which makes a dead letter.

    Leases that have ended are named; the others are released.
    """
    handler = _subscription(request, name)
    return _settled(queries.release(handler, _leases(given), delay=given.delay, error=given.error, options=inbox_options()))


urlpatterns = api.patterns


def _subscription(request: HttpRequest, name: str) -> Handler:
    require(request, "read", name)
    handler = registry.get(name)
    if handler is None or handler.kind.is_called:
        raise Problem(
            HTTPStatus.NOT_FOUND, f"There is no subscription {name}: the handlers.py of an installed app must call subscribe()."
        )
    return handler


def _leases(given: Leases) -> Sequence[str]:
    _require_at_most("leases", len(given.leases), MAX_MESSAGES)
    return list(dict.fromkeys(given.leases))


def _require_at_most(field: str, value: Any, most: Any) -> None:
    if value > most:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{field} is {value}, and the limit is {most}.")


def _settled(leases: Mapping[str, bool]) -> SettledLeases:
    return SettledLeases(
        settled=[name for name, done in leases.items() if done], ended=[name for name, done in leases.items() if not done]
    )
