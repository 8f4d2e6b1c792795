"""A registered handler: the function, what it is registered for, and its options."""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from asgiref.sync import AsyncToSync

from inbox.errors import NotCallable
from inbox.handlers.message import BizId, Message
from inbox.handlers.options import AS_THE_SETTINGS, Batch, Lease, Ordered, Retry, Shed
from inbox.handlers.timeouts import bounded
from outbox.kernel.text import fit

_EXIT_FORKED = 1


@dataclass(frozen=True, kw_only=True)
class Handler:
    """A registered handler.

    Attributes:
        name: stable and unique in this project.
        topic: the one topic it takes.
        function: the user's code.
        biz_id: asked for what to deduplicate on; None takes the message's own biz-id.
        using: the database alias of its inbox row and its effect.
        timeout: longest run of the function; None does not bound it.
        retry: how often a failed message is tried, and when.
        ordered: messages of one key are handled one at a time, in the order they were published; None keeps no order.
        batch: the function gets lists of messages; None gives it one message.
        lease: the function runs outside any transaction, guarded by a lease; None runs it inside one.
        group_commit: up to so many calls share one transaction.
        rate_limit: most messages a second, in all processes together; None does not bound it.
        concurrency: most threads of one process that it may use; None does not bound it.
        shed: which messages may be dropped when too many wait; None drops none.
    """

    name: str
    topic: str
    function: Callable[..., Any]
    biz_id: BizId | None
    using: str
    timeout: timedelta | None = None
    retry: Retry = AS_THE_SETTINGS
    ordered: Ordered | None = None
    batch: Batch | None = None
    lease: Lease | None = None
    group_commit: int = 1
    rate_limit: float | None = None
    concurrency: int | None = None
    shed: Shed | None = None

    @property
    def identity(self) -> tuple[str, str, str]:
        """What makes two handlers of one name the same: function, topic, database."""
        return origin(self.function), self.topic, self.using

    @property
    def skips_dead(self) -> bool:
        """Does a key continue without a dead letter?"""
        return self.ordered is not None and self.ordered.on_dead == "skip"

    @property
    def partitions(self) -> int:
        """How many queues share its keys."""
        return 1 if self.ordered is None else self.ordered.partitions

    def call(self, *messages: Message) -> object:
        """Run the user's code with one message, or with a list if it takes batches; returns its result.

        Raises:
            NotCallable: it returned something that is still to be run, so nothing has happened yet.
            HandlerTimeout: it took longer than `timeout`.
        """
        with _in_this_process(), bounded(self.name, self.timeout, by_itself=isinstance(self.function, AsyncToSync)):
            result = self.function(list(messages) if self.batch else messages[0])
            if result is not None and (inspect.isawaitable(result) or isinstance(result, Iterator | AsyncIterator)):
                if inspect.iscoroutine(result):
                    result.close()
                raise NotCallable(
                    f"The handler {self.name} returned {type(result).__name__}, which nobody would run, so it has had no "
                    "effect. Decorate the async function itself, or await and exhaust what it calls."
                )
            return result

    def identify(self, message: Message) -> str:
        """The biz-id of `message`, fit to be stored.

        Raises:
            TypeError: the user's `biz_id` returned a value that identifies nothing.
            Exception: what it raises.
        """
        if self.biz_id is None:
            return message.biz_id
        return as_biz_id(self.biz_id(message))


def as_biz_id(named: object) -> str:
    """The value that a user's `biz_id` returned, fit to be stored.

    Raises:
        TypeError: it identifies nothing.
    """
    if inspect.iscoroutine(named):
        named.close()
    if isinstance(named, bool) or not isinstance(named, str | int | UUID | Decimal | date) or named == "":
        raise TypeError(
            f"it answered {named!r}; a biz-id is non-empty text, a whole number, a UUID, a Decimal or a date, or messages "
            "that have nothing in common would count as one"
        )
    return fit(str(named))


def why_contradictory(handler: Handler) -> str | None:
    """Why these options cannot hold together, and what to do; None when they can."""
    if handler.ordered is not None and handler.group_commit > 1:
        return (
            f"group_commit={handler.group_commit} runs several messages in one transaction, and an ordered handler runs one "
            "message of a key at a time; leave one of the two out"
        )
    if handler.ordered is not None and handler.shed is not None:
        return "shed drops messages, and a key with missing messages is not in order; leave shed or ordered out"
    if handler.lease is not None and handler.timeout is not None and handler.timeout > handler.lease.limit:
        return (
            f"its timeout of {handler.timeout} is longer than the limit of its lease, {handler.lease.limit}, after which "
            "nothing of a run is settled; make the timeout shorter, or the limit longer with Lease(limit=...)"
        )
    return None


@contextmanager
def _in_this_process() -> Iterator[None]:
    """A child that the block forks ends where it would leave the block: it must not go on as a worker, on our connections."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(_EXIT_FORKED)


def origin(function: Callable[..., Any]) -> str:
    """The dotted path of a function."""
    inner = getattr(function, "awaitable", function)
    return f"{getattr(inner, '__module__', '?')}.{getattr(inner, '__qualname__', repr(inner))}"
