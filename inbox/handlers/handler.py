"""A registered handler: the function, what it is registered for, and its options."""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

from asgiref.sync import AsyncToSync

from inbox.errors import NotCallable
from inbox.handlers.message import BizId, Message
from inbox.handlers.options import Shed
from inbox.handlers.timeouts import bounded
from outbox.kernel.text import fit

OnDead = Literal["block", "skip"]
Mode = Literal["transaction", "lease"]

_EXIT_FORKED = 1


@dataclass(frozen=True, kw_only=True)
class Handler:
    """A registered handler.

    Attributes:
        name: stable and unique in this project.
        topic: the one topic it takes.
        function: called inside the transaction.
        biz_id: asked for what to deduplicate on; None takes the message's own biz-id.
        using: the database alias of its inbox row and its effect.
        timeout: longest run of the function; None does not bound it.
        ordered: messages of one key are handled one at a time, in the order they were published.
        on_dead: what a dead letter does to the later messages of its key, when `ordered`.
        partitions: how many queues share the keys of an `ordered` handler.
        batch: the function gets lists of up to so many messages; 0 gives it one message.
        batch_wait: longest wait until a batch is full.
        group_commit: up to so many calls share one transaction.
        mode: "transaction", or "lease" for effects outside the database.
        lease: how long a run under a lease may stay silent before another takes its message.
        lease_limit: longest run under a lease, however often it is extended.
        rate_limit: most messages a second, in all processes together; None does not bound it.
        shed: which messages may be dropped when too many wait.
    """

    name: str
    topic: str
    function: Callable[..., Any]
    biz_id: BizId | None
    using: str
    timeout: timedelta | None = None
    ordered: bool = False
    on_dead: OnDead = "block"
    partitions: int = 1
    batch: int = 0
    batch_wait: timedelta = timedelta(seconds=0.2)
    group_commit: int = 1
    mode: Mode = "transaction"
    lease: timedelta = timedelta(minutes=10)
    lease_limit: timedelta = timedelta(hours=1)
    rate_limit: float | None = None
    shed: Shed | None = None

    @property
    def identity(self) -> tuple[str, str, str]:
        """What makes two handlers of one name the same: function, topic, database."""
        return origin(self.function), self.topic, self.using

    def call(self, *messages: Message) -> object:
        """Run the user's code with one message, or with a list when it takes batches; what it returned.

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
        """The biz-id of `message`, always fit to be stored.

        Raises:
            TypeError: the user's `biz_id` answered with something that names nothing.
            Exception: whatever it raises.
        """
        if self.biz_id is None:
            return message.biz_id
        named = self.biz_id(message)
        if inspect.iscoroutine(named):
            named.close()
        if isinstance(named, bool) or not isinstance(named, str | int | UUID | Decimal | date) or named == "":
            raise TypeError(
                f"it answered {named!r}; a biz-id is non-empty text, a whole number, a UUID, a Decimal or a date, or messages "
                "that have nothing in common would count as one"
            )
        return fit(str(named))


def why_contradictory(handler: Handler) -> str | None:
    """Why these options cannot hold together, or None when they can."""
    leased, together = handler.mode == "lease", bool(handler.batch) or handler.group_commit > 1
    spans = [handler.batch_wait, handler.lease, handler.lease_limit, *([] if handler.timeout is None else [handler.timeout])]
    wrong = {
        f"on_dead is {handler.on_dead!r}, and it must be 'block' or 'skip'": handler.on_dead not in {"block", "skip"},
        f"mode is {handler.mode!r}, and it must be 'transaction' or 'lease'": handler.mode not in {"transaction", "lease"},
        f"batch is {handler.batch}, and it must be 0 or more": handler.batch < 0,
        f"group_commit is {handler.group_commit}, and it must be 1 or more": handler.group_commit < 1,
        f"partitions is {handler.partitions}, and it must be 1 or more": handler.partitions < 1,
        "timeout, batch_wait, lease and lease_limit must be longer than nothing": min(spans) <= timedelta(),
        "lease_limit is shorter than lease": handler.lease_limit < handler.lease,
        "on_dead='skip' and partitions need ordered=True": not handler.ordered
        and (handler.on_dead == "skip" or handler.partitions > 1),
        "batch and group_commit exclude each other: a batch is one transaction already": bool(handler.batch)
        and handler.group_commit > 1,
        "ordered=True handles one message of a key at a time, so it excludes batch and group_commit": handler.ordered
        and together,
        "mode='lease' has no transaction, so it excludes batch and group_commit": leased and together,
        "an ordered message must not be dropped, so ordered=True excludes shed": handler.ordered and handler.shed is not None,
    }
    return next((reason for reason, holds in wrong.items() if holds), None)


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
