"""Call a handler directly, in the transaction that the inbox would give it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from django.db import DatabaseError, InterfaceError

from inbox.conf import inbox_options
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.models import InboxMessage
from inbox.receiving.reading import read
from inbox.store import arrivals
from inbox.testing.messages import envelope_of, make_message, through_json
from inbox.testing.observing import registered
from inbox.transactions.handler_transaction import in_transaction
from outbox.database.testing.environment import require_tests
from outbox.kernel.context import Cause, caused_by
from outbox.kernel.identity import new_message_id


def run_handler(handler: Callable[..., Any] | str, *messages: Any, **attributes: Any) -> Any:
    """Call a handler in a transaction as the inbox does; what it returned.

    Its exceptions reach the test, and what it publishes is in the outbox. A handler that swallows a database error or ends the
    transaction fails as in production. Nothing stays in the inbox: no row, no deduplication, no retry. An async handler is run
    to its end. A handler under a lease gets no transaction, and takes its steps. A handler with a `biz_id` of its own gets the
    message under that.

    Args:
        handler: what `@idempotent_handler` decorates, or the name of the handler.
        messages: one, from `make_message` or just its payload; several for a handler that takes batches.
        attributes: of messages that are given as payloads, as for `make_message`.

    Raises:
        LookupError: this is not a handler of the topic of the message.
        TypeError: there are attributes for a message that has its own.
        ValueError: this number of messages cannot be given to it.
        inbox.errors.InboxError: its transaction could not commit.
        Exception: what the handler raises.
    """
    require_tests("run_handler")
    if not messages:
        raise ValueError("run_handler() needs a message: a payload, or see make_message().")
    first = messages[0]
    known = registered(handler, first.topic if isinstance(first, Message) else None)
    if len(messages) > 1 and not known.batch:
        raise ValueError(f"The handler {known.name} takes one message at a time, and {len(messages)} were given.")
    made = [_made(known, message, attributes) for message in messages]
    if known.lease:
        steps = _Steps()
        return _call(known, [replace(message, _steps=steps) for message in made])
    return _call_in_transaction(known, made)


def _made(handler: Handler, given: Any, attributes: dict[str, Any]) -> Message:
    if isinstance(given, Message) and attributes:
        raise TypeError(f"{', '.join(attributes)}: the message has its own. Pass them to make_message().")
    message: Message = given if isinstance(given, Message) else make_message(handler.topic, given, **attributes)
    return replace(message, biz_id=handler.identify(message))


def _call(handler: Handler, messages: list[Message]) -> Any:
    with caused_by(Cause(message_id=messages[0].id, correlation_id=messages[0].correlation_id)):
        return handler.call(*messages)


def _call_in_transaction(handler: Handler, messages: list[Message]) -> Any:
    """With an inbox row, which proves that the transaction has committed, under a name that no other message has."""
    options = inbox_options()
    row = replace(read(handler, envelope_of(messages[0]), options).row, biz_id=f"run_handler:{new_message_id()}")
    returned: list[Any] = []
    try:
        in_transaction(
            handler,
            partial(arrivals.begin_fresh, handler.using, row, options.DUPLICATE_TIMEOUT),
            lambda: returned.append(_call(handler, messages)),
            of=messages[0].id,
            attempt=messages[0].attempt,
            durable=False,
        )
    finally:
        # It stays after a failure, too, if the handler has committed by itself.
        with suppress(DatabaseError, InterfaceError):
            InboxMessage.objects.using(handler.using).filter(handler=row.handler, topic=row.topic, biz_id=row.biz_id).delete()
    return returned[0]


class _Steps:
    """Takes the steps of one call, and remembers them for that long."""

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
