"""The operations of the API: read, acknowledge, extend, release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus

from django.http import HttpRequest

from exactly_once.http.api import Api, answers, client_of, require
from exactly_once.http.problems import Problem, unavailable
from exactly_once.http_options import HttpOptions
from inbox.conf import inbox_options
from inbox.handlers.handler import Handler
from inbox.http import reading
from inbox.http.schemas import Extension, LeasedMessage, LeasedMessages, Leases, Reading, Release, SettledLeases
from inbox.http.subscribing import subscription
from inbox.http.waiting import places_for, until_found
from inbox.transactions.persistence import DatabaseUnavailable

_BODY_LIMIT_BYTES = 1024 * 1024
"""Of requests, which contain no messages."""


def _options() -> HttpOptions:
    return inbox_options().http


api = Api(
    name="inbox_http",
    title="Inbox",
    description="Read the messages of a subscription, each under a lease, and acknowledge them.",
    options=_options,
    body_limit=lambda: _BODY_LIMIT_BYTES,
    answered={DatabaseUnavailable: unavailable},
)


@api.post("/subscriptions/{name}/read", operation_id="read", response=answers({200: LeasedMessages}, 404, 429))
async def read(request: HttpRequest, name: str, how: Reading) -> LeasedMessages:
    """Read due messages, or wait for one. Each is the client's until its lease ends."""
    handler, options, limits = _subscription(request, name), inbox_options(), _options()
    _require_at_most("max_messages", how.max_messages, limits.MAX_MESSAGES)
    _require_at_most("wait_seconds", how.wait_seconds, limits.MAX_WAIT.total_seconds())
    leased = await until_found(
        partial(reading.claim, handler, how.max_messages, how.lease, options),
        alias=handler.using,
        wait=how.wait,
        longest_pause=options.POLL_INTERVAL,
        client=client_of(request).name,
        places=places_for(request, limits),
    )
    return LeasedMessages(messages=[LeasedMessage.of(message) for message in leased])


@api.post("/subscriptions/{name}/acknowledge", operation_id="acknowledge", response=answers({200: SettledLeases}, 404))
def acknowledge(request: HttpRequest, name: str, given: Leases) -> SettledLeases:
    """The messages are handled. Leases that have ended are named; the others are acknowledged. It may be repeated."""
    return _settled(reading.acknowledge(_subscription(request, name), _leases(given), inbox_options()))


@api.post("/subscriptions/{name}/extend", operation_id="extend", response=answers({200: SettledLeases}, 404))
def extend(request: HttpRequest, name: str, given: Extension) -> SettledLeases:
    """Keep the messages for longer. Leases that have ended are named; the others are extended."""
    return _settled(reading.extend(_subscription(request, name), _leases(given), given.lease))


@api.post("/subscriptions/{name}/release", operation_id="release", response=answers({200: SettledLeases}, 404))
def release(request: HttpRequest, name: str, given: Release) -> SettledLeases:
    """Give messages back, at once or after a delay; with an error, as a failed attempt, the last of which makes a dead letter.

    Leases that have ended are named; the others are released.
    """
    handler = _subscription(request, name)
    return _settled(reading.release(handler, _leases(given), delay=given.delay, error=given.error, options=inbox_options()))


def _subscription(request: HttpRequest, name: str) -> Handler:
    require(request, "read", name)
    if (handler := subscription(name)) is None:
        raise Problem(
            HTTPStatus.NOT_FOUND, f"There is no subscription {name}: the handlers.py of an installed app must call subscribe()."
        )
    return handler


def _leases(given: Leases) -> Sequence[str]:
    _require_at_most("leases", len(given.leases), _options().MAX_MESSAGES)
    return list(dict.fromkeys(given.leases))


def _require_at_most(field: str, value: float, most: float) -> None:
    if value > most:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{field} is {value:g}, and the limit is {most:g}.")


def _settled(leases: Mapping[str, bool]) -> SettledLeases:
    return SettledLeases(
        settled=[name for name, done in leases.items() if done], ended=[name for name, done in leases.items() if not done]
    )
