"""Helpers for the tests of handlers.

    from inbox.testing import call_handler, make_message

    call_handler(reserve_stock, make_message("shop.order.placed", {"order": "1001"}, biz_id="order-1001"))

To have a handler run by the inbox itself, with deduplication and retries, see `outbox.testing.run_relay`. The names below are
public.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.db import transaction

from inbox.conf import inbox_options
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.handlers.registry import registry
from inbox.local import LocalTransport
from inbox.runner import Runner
from outbox.kernel.clock import utcnow
from outbox.kernel.context import Cause, caused_by
from outbox.kernel.identity import new_message_id

__all__ = ["call_handler", "make_message"]


def make_message(
    topic: str,
    payload: Any,
    *,
    id: str = "",  # noqa: A002 - as the attribute of the message is called
    biz_id: str = "",
    key: str = "",
    headers: Mapping[str, Any] | None = None,
    created_at: datetime | None = None,
    attempt: int = 1,
    correlation_id: str = "",
    causation_id: str = "",
    fence: int = 0,
) -> Message:
    """A message as a handler gets it.

    Args:
        payload: what `publish()` takes. The handler gets it as it comes out of JSON: a Decimal or a date is text.
        id: default: a new one.
        biz_id: default: the id.
        created_at: default: now.
        attempt: counted from 1; from 2 on the message is `redelivered`.
        correlation_id: default: the id.
    """
    id = id or str(new_message_id())  # noqa: A001
    return Message(
        id=id,
        topic=topic,
        key=key,
        biz_id=biz_id or id,
        payload=_through_json(payload),
        headers=dict(headers or {}),
        created_at=created_at or utcnow(),
        attempt=attempt,
        redelivered=attempt > 1,
        correlation_id=correlation_id or id,
        causation_id=causation_id,
        fence=fence,
    )


def call_handler(function: Callable[..., Any], *messages: Message) -> Any:
    """Call a handler directly, in a transaction as the inbox does; what it returned.

    So it may publish, and its exceptions reach the test. Nothing is stored in the inbox: no row, no deduplication, no retry. An
    async handler is run to its end. One under a lease gets no transaction, and takes its steps. A handler with a `biz_id`
    of its own gets the message under that.

    Args:
        function: what `@idempotent_handler` decorates.
        messages: one; several for a handler of batches.

    Raises:
        LookupError: `function` is not a handler of the topic of the message.
        ValueError: this number of messages cannot be given to it.
        Exception: what the handler raises.
    """
    if not messages:
        raise ValueError("call_handler() needs a message: see make_message().")
    handler = _registered(function, messages[0].topic)
    if len(messages) > 1 and not handler.batch:
        raise ValueError(f"The handler {handler.name} takes one message at a time, and {len(messages)} were given.")
    steps = _Steps() if handler.lease else None
    given = [replace(message, biz_id=handler.identify(message), _steps=steps) for message in messages]
    with _surroundings(handler, given[0]):
        return handler.call(*given)


def _through_json(value: Any) -> Any:
    return json.loads(json.dumps(value, cls=DjangoJSONEncoder, allow_nan=False))


def _registered(function: Callable[..., Any], topic: str) -> Handler:
    known = [handler for handler in registry.all() if function in {handler.function, _coroutine_function(handler)}]
    for handler in known:
        if handler.topic == topic:
            return handler
    topics = ", ".join(repr(handler.topic) for handler in known)
    raise LookupError(
        f"{function!r} takes {topics}, and the message is of the topic {topic!r}."
        if known
        else f"{function!r} is no handler: decorate it with @idempotent_handler({topic!r}), or call it yourself."
    )


def _coroutine_function(handler: Handler) -> object:
    """What was decorated, if that was an `async def`."""
    return getattr(getattr(handler.function, "awaitable", None), "__wrapped__", None)


@contextmanager
def _surroundings(handler: Handler, message: Message) -> Iterator[None]:
    cause = Cause(message_id=message.id, correlation_id=message.correlation_id)
    with caused_by(cause):
        if handler.lease:
            yield
        else:
            with transaction.atomic(using=handler.using):
                yield


class LocalTestTransport(LocalTransport):
    """What `outbox.testing.run_relay` hands messages to: `local://` without waiting for rate limits.

    Args:
        alias: the database of the outbox.
        is_broker: `local://` is the broker of the project, so what it refuses is refused. Beside another broker a handler may
            write to another database than the outbox's.
    """

    def __init__(self, alias: str, *, is_broker: bool) -> None:
        super().__init__("local://", alias=alias, exchange="")
        self._runner = Runner(inbox_options(), handlers=_unlimited)
        self._is_broker = is_broker

    def _elsewhere(self, handlers: Sequence[Handler]) -> Sequence[Handler]:
        return super()._elsewhere(handlers) if self._is_broker else ()


def _unlimited() -> list[Handler]:
    return [replace(handler, rate_limit=None, concurrency=None) for handler in registry.all()]


class _Steps:
    """Takes the steps of one call, and remembers them for that long."""

    def __init__(self) -> None:
        self._taken: dict[str, Any] = {}

    def take(self, name: str, function: Callable[[], Any], *, repeatable: bool) -> Any:
        if name not in self._taken:
            self._taken[name] = _through_json(function())
        return self._taken[name]

    async def atake(self, name: str, function: Callable[[], Awaitable[Any]], *, repeatable: bool) -> Any:
        if name not in self._taken:
            self._taken[name] = _through_json(await function())
        return self._taken[name]
