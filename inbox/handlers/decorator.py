"""`@idempotent_handler`.

Handlers are found in each app's `handlers.py`. Deduplication goes by a handler's name: a handler with a new name sees every
message for the first time, so give `name=` before you rename a function.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping
from datetime import timedelta
from functools import update_wrapper
from typing import Any, TypeVar

from asgiref.sync import async_to_sync
from django.apps import apps
from django.db import DEFAULT_DB_ALIAS

from inbox.errors import NotCallable
from inbox.handlers.handler import Handler, Mode, OnDead, origin, why_contradictory
from inbox.handlers.message import BizId, Message
from inbox.handlers.options import Shed, per_second
from inbox.handlers.registry import registry
from outbox.kernel.text import why_no_topic, why_unfit

Function = TypeVar("Function", bound=Callable[..., Any])


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
            raise NotCallable(f"{origin(function)} is a generator function: calling it would run nothing. Use return.")
        if biz_id is not None and not isinstance(biz_id, str) and not callable(biz_id):
            raise TypeError(f"biz_id is {biz_id!r}: it must be a function of the message, or the path of a payload's field.")
        if inspect.iscoroutinefunction(biz_id):
            raise NotCallable(f"The biz_id of {origin(function)} is async: it must answer at once, from the message alone.")
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
