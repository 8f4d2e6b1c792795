"""Call a handler directly, in a transaction as in production."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from django.db import DatabaseError, InterfaceError

from exactly_once.telemetry.tracing import Cause, caused_by
from exactly_once.testing.database import require_tests
from exactly_once.wire.identity import new_message_id
from inbox.conf import inbox_options
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.receiving.reading import read
from inbox.store import arrivals, receipts
from inbox.testing.messages import envelope_of, make_message, through_json
from inbox.testing.observing import registered
from inbox.transactions.running import in_transaction


def run_handler(handler: Callable[..., Any] | str, *messages: Any, **attributes: Any) -> Any:
    """Call a handler in a transaction as the inbox does; returns its result.

    Its exceptions reach the test, and messages that it publishes are in the outbox. A handler that swallows a database error
    or ends the transaction fails as in production. The inbox stores nothing: no row, no deduplication, no retry. An async
    handler runs to completion. A leased handler gets no transaction, and takes its steps. A handler with `biz_id=` gets the
    message with that biz-id. A join gets a `Join` of the given messages; the other topics are missing.

    Args:
        handler: the decorated function, or the name of the handler.
        messages: one message from `make_message`, or its payload; several for a batch handler; for a join, messages of
            `make_message`.
        attributes: for messages that are given as payloads; see `make_message`.

    Raises:
        LookupError: the function is not a handler of the message's topic.
        TypeError: `attributes` were given with a Message, which has its own.
        ValueError: there is no message, or several for a handler that takes one.
        inbox.errors.InboxError: its transaction could not commit.
        Exception: what the handler raises.
    """
    require_tests("run_handler")
    if not messages:
        raise ValueError("run_handler() needs at least one message: a payload, or a Message from make_message().")
    first = messages[0]
    known = registered(handler, first.topic if isinstance(first, Message) else None)
    if len(messages) > 1 and not (known.kind.gets_list or known.kind.all_of):
        raise ValueError(f"The handler {known.name} takes one message at a time, but {len(messages)} were given.")
    if (known.kind.all_of or len(known.topics) > 1) and not isinstance(first, Message):
        raise ValueError(f"The handler {known.name} needs messages from make_message(), because their topics matter.")
    prepared = [_message_for(known, message, attributes) for message in messages]
    if known.lease:
        steps = _Steps()
        return _call(known, [replace(message, _steps=steps) for message in prepared])
    return _call_in_transaction(known, prepared)


def _message_for(handler: Handler, given: Any, attributes: dict[str, Any]) -> Message:
    if isinstance(given, Message) and attributes:
        raise TypeError(f"{', '.join(attributes)}: a Message has its own attributes. Pass these to make_message().")
    message: Message = given if isinstance(given, Message) else make_message(handler.topics[0], given, **attributes)
    message = handler.typed(message)
    return replace(message, biz_id=handler.identify(message))


def _call(handler: Handler, messages: list[Message]) -> Any:
    with caused_by(Cause(message_id=messages[0].id, correlation_id=messages[0].correlation_id)):
        return handler.call(*messages)


def _call_in_transaction(handler: Handler, messages: list[Message]) -> Any:
    """With an inbox row, which proves that the transaction can commit, under a unique biz-id."""
    options = inbox_options()
    row = replace(read(handler, envelope_of(messages[0]), options).row, biz_id=f"run_handler:{new_message_id()}")
    returned: list[Any] = []
    try:
        in_transaction(
            handler,
            partial(arrivals.begin_fresh, handler.using, [row], options.DUPLICATE_TIMEOUT, limits=handler.limits),
            lambda: returned.append(_call(handler, messages)),
            of=lambda: messages[0].id,
            durable=False,
        )
    finally:
        # The row also exists after a failure, if the handler has committed its transaction.
        with suppress(DatabaseError, InterfaceError):
            receipts.delete(handler.using, f"id = {receipts.ID_OF}", receipts.name_of(row))
    return returned[0]


class _Steps:
    """Runs the steps of one call, and holds their results in memory."""

    def __init__(self) -> None:
        self._taken: dict[str, Any] = {}

    def take(self, name: str, function: Callable[[], Any], *, repeatable: bool) -> Any:
        if name not in self._taken:
            self._taken[name] = through_json(function())
        return self._taken[name]

    async def atake(self, name: str, function: Callable[[], Awaitable[Any]], *, repeatable: bool) -> Any:
        if name not in self._taken:
            self._taken[name] = through_json(await function())
        return self._taken[name]
