"""The end of a published set: one message when the last message of the set has been handled.

`outbox.publish_many(drafts, on_done=...)` publishes, with the set, a message that lists it. Its handler here looks the receipts
of the set up, and defers itself until none is missing and no message is open. Then it publishes the end in its own transaction,
so that happens once, whatever is delivered again or killed, and costs the messages of the set nothing.

An open message includes a dead letter: the end waits until an operator has retried or skipped it. A skipped or shed message
does not hold up the end. A message that is still missing after `KEEP_HISTORY` makes the end a dead letter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial, update_wrapper
from importlib import import_module
from itertools import chain, product
from typing import NoReturn

from django.core.checks import CheckMessage, Error

from exactly_once.checks import check_with
from exactly_once.process.clock import utcnow
from exactly_once.wire.formats import PUBLISHED_SETS
from inbox.conf import IN_THE_DATABASE, InboxOptions, inbox_options
from inbox.contrib.joins import store
from inbox.errors import Reject, RetryLater
from inbox.handlers.decorator import database_of, registering
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.handlers.registry import registry

_AT_ONCE = 1_000
_REMEDY = "Set INBOX['LEASE_STORE'] to 'database', or name other handlers in by=."
_SOONEST, _LATEST = timedelta(seconds=1), timedelta(minutes=1)


def when_handled(topic: str, *, by: Sequence[str], using: str | None = None) -> None:
    """Publish the `on_done` message of this topic for each set of `publish_many` whose messages these handlers have handled.

    It comes late by up to a tenth of the time since the set was published, at least a second and at most a minute. One service
    declares a topic, that of the handlers.

    Args:
        topic: of the `on_done` message.
        by: the names of the handlers, each of which counts for the messages of its topics.
        using: the database alias of the handlers and of the outbox. Default: that of the database routers.

    Raises:
        ValueError: the topic is invalid, or was declared with other handlers.
    """
    alias, name = database_of(using), f"{PUBLISHED_SETS}{topic}"
    known = registry.get(name)
    if known and {*(earlier := _counted(known))} != {*by}:
        raise ValueError(
            f"when_handled({topic!r}) was called with by={[*earlier]}, and with by={[*by]}. Call it once, with all handlers in "
            "one by=[...]."
        )
    function = update_wrapper(partial(_finish, alias, tuple(by)), _finish)
    registering([name], name=name, using=alias, publishes=(topic,))(function)


def _counted(handler: Handler) -> Sequence[str]:
    """The handlers that the handler of a set counts; none, if it is another one."""
    function = handler.function
    return function.args[1] if isinstance(function, partial) and function.func is _finish else ()


def _finish(alias: str, by: Sequence[str], message: Message) -> None:
    """
    Raises:
        RetryLater: a message is not handled.
        Reject: a handler, or one for a topic of the set, does not exist in this database, or leaves no row of a handled
            message; or see `_wait`.
    """
    handlers = [handler for handler in registry.all() if handler.name in by and handler.using == alias]
    members: dict[str, list[tuple[str, str]]] = message.payload["members"]
    lacking = {*by}.difference(handler.name for handler in handlers) or members.keys() - {*chain(*(h.topics for h in handlers))}
    if lacking:
        raise Reject(f"when_handled() counts no handler of {sorted(lacking)} in the database {alias!r}. Correct its by=.")
    if rowless := _rowless(by):
        raise Reject(f"{rowless} keep their leases in Redis, and leave no row of a handled message. {_REMEDY}")
    for handler, topic in product(handlers, members):
        for start in range(0, len(members[topic]) if topic in handler.topics else 0, _AT_ONCE):
            if found := store.first_unhandled(alias, handler, topic, dict(members[topic][start : start + _AT_ONCE])):
                _wait(handler, message, *found)
    import_module("outbox").publish(**message.payload["on_done"], using=alias)


def _rowless(by: Sequence[str]) -> list[str]:
    """Those of these handlers whose success writes nothing to the database."""
    in_redis = inbox_options().LEASE_STORE != IN_THE_DATABASE
    return [handler.name for handler in registry.all() if in_redis and handler.lease and handler.name in by]


@check_with(inbox_options)
def check_leases(chosen: InboxOptions) -> Iterator[CheckMessage]:
    """inbox_joins.E003: a set that is counted by handlers whose leases are in Redis."""
    for counter in registry.all():
        if rowless := _rowless(_counted(counter)):
            yield Error(
                f"when_handled({counter.publishes[0]!r}) counts {rowless}, whose leases are in Redis: no set of it ever ends.",
                hint=_REMEDY,
                id="inbox_joins.E003",
            )


def _wait(handler: Handler, message: Message, missing: str, state: str) -> NoReturn:
    """
    Raises:
        RetryLater: this message is not handled.
        Reject: it may never come, or it is not known any more whether it is handled: it was cancelled, it has expired, or its
            row, which alone had the name that it was published with, is deleted with the history.
    """
    age, kept = utcnow() - (message.created_at or utcnow()), inbox_options().keeps
    if not state and age > kept and not store.is_unsent(handler.using, missing):
        raise Reject(
            f"{handler.name} has no message {missing}: it was cancelled, has expired, is late, or was settled more than "
            f"KEEP_HISTORY ({kept}) ago. Look its effect up. If it is there, or not wanted, publish the end by hand and skip "
            "this message; otherwise retry this one later."
        )
    which = f"which is {state}" if state else "which has not come"
    raise RetryLater(min(max(age / 10, _SOONEST), _LATEST), f"waits in {handler.name} for message {missing}, {which}")
