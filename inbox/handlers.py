"""What a user writes: a function, a decorator, a message.

Handlers are found in each app's `handlers.py`. Their names are what deduplication rests on: a handler that changes its name
is a new one and sees every message for the first time, so give `name=` before you rename a function.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import update_wrapper
from typing import Any, Literal, Protocol, TypeVar
from uuid import UUID

from asgiref.sync import AsyncToSync, async_to_sync
from django.apps import apps
from django.db import DEFAULT_DB_ALIAS

from inbox.errors import NotCallable
from inbox.limits import Shed, per_second
from inbox.timeouts import bounded
from outbox.kernel.text import fit, why_no_topic, why_unfit

OnDead = Literal["block", "skip"]
Mode = Literal["transaction", "lease"]

_EXIT_FORKED = 1


class StepTaker(Protocol):
    """What remembers the steps of a message that runs under a lease."""

    def take(self, name: str, function: Callable[[], Any], *, repeatable: bool) -> Any:
        """See `Message.step`."""

    async def atake(self, name: str, function: Callable[[], Awaitable[Any]], *, repeatable: bool) -> Any:
        """See `Message.astep`."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """What a handler gets.

    Attributes:
        id: the message id, the same on every redelivery; use it as the idempotency key of calls to others.
        topic: what it is about.
        key: its ordering key, or "".
        biz_id: what it is deduplicated on.
        payload: decoded JSON.
        headers: the publisher's own.
        created_at: when it was published, by the producer's clock; None when a foreign producer did not say.
        attempt: which try this is, counted from 1.
        redelivered: it has been tried before.
        correlation_id: the first message of the chain this one belongs to, or "".
        causation_id: the message whose handler published this one, or "".
        fence: under a lease its fencing token, greater than that of any earlier run of this message; else 0.
    """

    id: str
    topic: str
    key: str
    biz_id: str
    payload: Any
    headers: Mapping[str, Any]
    created_at: datetime | None
    attempt: int
    redelivered: bool
    correlation_id: str
    causation_id: str
    fence: int = 0
    _steps: StepTaker | None = field(default=None, repr=False, compare=False)

    def step(self, name: str, function: Callable[[], Any], *, repeatable: bool = True) -> Any:
        """Take a named step once for this message: what `function` returned, now or in an earlier attempt.

        For handlers with mode="lease". The result is remembered in a commit of its own, as JSON, and comes back as JSON has it:
        a tuple is a list, a Decimal is text.

        Args:
            name: unique among the steps of this handler.
            function: called without arguments. When it raises, the step was not taken, and a retry takes it.
            repeatable: False for what must not happen twice even when this process dies in the middle, or it fails half-way. It
                is written down before it begins, and when it has not ended, the message is a dead letter for a person to decide
                about. A function that knows that nothing has happened raises RetryLater or Reject.

        Raises:
            StepInterrupted: a step that is not repeatable was begun before and has not ended, or it failed.
            LeaseLost: the lease of this run has ended; when the step was not taken, the message says so.
            RuntimeError: the handler has no lease, or this is an async function, which wants `astep`.
            ValueError: no such name, or it is inside a transaction.
        """
        return self._under_a_lease(name).take(name, function, repeatable=repeatable)

    async def astep(self, name: str, function: Callable[[], Awaitable[Any]], *, repeatable: bool = True) -> Any:
        """`step` for async handlers: what awaiting `function()` gave."""
        return await self._under_a_lease(name).atake(name, function, repeatable=repeatable)

    def _under_a_lease(self, step: str) -> StepTaker:
        if self._steps is None:
            raise RuntimeError(
                f"The step {step!r} was not taken: nothing here would remember it. Steps are for handlers with mode='lease'. A "
                "handler in a transaction needs none: its effect and its inbox row commit together."
            )
        return self._steps


BizId = Callable[[Message], object]
Function = TypeVar("Function", bound=Callable[..., Any])


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
        return _origin(self.function), self.topic, self.using

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


class Registry:
    """The handlers of this process, by name."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def add(self, handler: Handler) -> None:
        """Raises ValueError when another function, or the same one for something else, already has the name."""
        known = self._handlers.get(handler.name)
        if known is not None and known.identity != handler.identity:
            raise ValueError(
                f"Two handlers are called {handler.name!r}: {' on '.join(known.identity)}, and "
                f"{' on '.join(handler.identity)}. Their inbox rows would be mixed up; give one of them another name=."
            )
        self._handlers[handler.name] = handler

    def remove(self, name: str) -> None:
        self._handlers.pop(name, None)

    def get(self, name: str) -> Handler | None:
        return self._handlers.get(name)

    def all(self) -> list[Handler]:
        return list(self._handlers.values())

    def for_topic(self, topic: str) -> list[Handler]:
        return [handler for handler in self._handlers.values() if handler.topic == topic]


registry = Registry()


@contextmanager
def _in_this_process() -> Iterator[None]:
    """A child that the block forks ends where it would leave the block: it must not go on as a worker, on our connections."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(_EXIT_FORKED)


def idempotent_handler(
    topic: str,
    *,
    biz_id: BizId | str | None = None,
    name: str | None = None,
    using: str = DEFAULT_DB_ALIAS,
    timeout: timedelta | None = None,
    ordered: bool = False,
    on_dead: OnDead = "block",
    partitions: int = 1,
    batch: int = 0,
    batch_wait: float = 0.2,
    group_commit: int = 1,
    mode: Mode = "transaction",
    lease: timedelta = timedelta(minutes=10),
    lease_limit: timedelta = timedelta(hours=1),
    rate_limit: str | None = None,
    shed: Shed | None = None,
) -> Callable[[Function], Function]:
    """Have the decorated function handle every message of `topic`, its effect exactly once per biz-id.

    The function runs inside a transaction on `using` that also holds the inbox row. Returning means done; `RetryLater` means
    later, `Reject` means never, any other exception is a failed attempt that is retried. It stays callable as it was. An
    `async def` is run to its end on the thread that holds the transaction.

    Args:
        topic: the topic to take, exactly.
        biz_id: what the message is deduplicated on: a function of the message, or the path of a field of its payload
            ("order_id", "order.id"); default: its own biz-id, else its id.
        name: stable name of this handler; default: `<app label>.<function name>`. Deduplication and its queue rest on it.
        using: the database alias that the effect is written to.
        timeout: a run that takes longer is a failed attempt; default: unbounded.
        ordered: handle the messages of one key one at a time, in order; different keys in parallel.
        on_dead: "block" keeps the later messages of a dead letter's key waiting until an operator retries or skips it,
            "skip" goes on without it. With `ordered` only.
        partitions: queues that share the keys of an `ordered` handler, by consistent hash (RabbitMQ).
        batch: more than 0 hands the function a list of up to so many messages, in one transaction.
        batch_wait: seconds to wait for a batch to fill.
        group_commit: more than 1 runs so many calls in one transaction; when one raises, all are run again singly.
        mode: "lease" runs the function outside any transaction, guarded by a lease, for effects outside the database: at
            least once, never two at a time, see `Message.step`.
        lease: longest silence of a process that holds a lease. It is extended while the function runs.
        lease_limit: longest run under a lease.
        rate_limit: like "2000/s", "100/m" or "5/h": most messages in that time, in all processes together.
        shed: which messages may be dropped, and above how many waiting ones.

    Raises:
        NotCallable: the function is a generator function, or `biz_id` is async; calling it would run nothing.
        TypeError: `biz_id` is neither, or a span of time is no timedelta.
        ValueError: the topic cannot be one, the name is taken, or options contradict each other; a function that takes two
            topics needs two names.
    """
    if reason := why_no_topic(topic):
        raise ValueError(f"The topic {topic!r} cannot be handled: {reason}.")
    _refuse_numbers(lease=lease, lease_limit=lease_limit, **({} if timeout is None else {"timeout": timeout}))

    def decorate(function: Function) -> Function:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise NotCallable(f"{_origin(function)} is a generator function: calling it would run nothing. Use return.")
        if biz_id is not None and not isinstance(biz_id, str) and not callable(biz_id):
            raise TypeError(f"biz_id is {biz_id!r}: it must be a function of the message, or the path of a payload's field.")
        if inspect.iscoroutinefunction(biz_id):
            raise NotCallable(f"The biz_id of {_origin(function)} is async: it must answer at once, from the message alone.")
        runnable: Callable[..., Any] = function
        if inspect.iscoroutinefunction(function):
            runnable = async_to_sync(_as_coroutine(function, timeout))
        known_as = name or _default_name(function)
        if reason := why_unfit(known_as):
            raise ValueError(f"The name {known_as!r} cannot be a handler's: {reason}.")
        handler = Handler(
            name=known_as,
            topic=topic,
            function=runnable,
            biz_id=_field(biz_id) if isinstance(biz_id, str) else biz_id,
            using=using,
            timeout=timeout,
            ordered=ordered,
            on_dead=on_dead,
            partitions=partitions,
            batch=batch,
            batch_wait=timedelta(seconds=batch_wait),
            group_commit=group_commit,
            mode=mode,
            lease=lease,
            lease_limit=lease_limit,
            rate_limit=None if rate_limit is None else per_second(rate_limit),
            shed=shed,
        )
        if reason := why_contradictory(handler):
            raise ValueError(f"The handler {known_as} cannot be registered: {reason}.")
        registry.add(handler)
        return function

    return decorate


def _refuse_numbers(**spans: object) -> None:
    for option, span in spans.items():
        if not isinstance(span, timedelta):
            raise TypeError(f"{option} is {span!r}: it must be a datetime.timedelta, such as timedelta(seconds=30).")


def _field(path: str) -> BizId:
    """A function that follows `path` into the payload."""

    def follow(message: Message) -> object:
        found = message.payload
        for name in path.split("."):
            if not isinstance(found, Mapping) or name not in found:
                raise LookupError(f"the payload has no field {path!r}")
            found = found[name]
        return found

    return follow


def _as_coroutine(function: Callable[..., Any], limit: timedelta | None) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def run(given: Message | list[Message]) -> Any:
        async with asyncio.timeout(limit.total_seconds() if limit else None):
            return await function(given)

    return update_wrapper(run, function)


def _default_name(function: Callable[..., Any]) -> str:
    if not hasattr(function, "__name__"):
        raise ValueError(f"{function!r} has no name of its own to be known by: give the handler a name=.")
    config = apps.get_containing_app_config(function.__module__)
    return f"{config.label if config else function.__module__}.{function.__name__}"


def _origin(function: Callable[..., Any]) -> str:
    inner = getattr(function, "awaitable", function)
    return f"{getattr(inner, '__module__', '?')}.{getattr(inner, '__qualname__', repr(inner))}"
