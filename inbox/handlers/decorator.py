"""The decorators that make a function a handler: of one message, of a list, of one message under a lease.

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
from inbox.handlers.handler import Handler, origin, why_contradictory
from inbox.handlers.message import BizId, Message
from inbox.handlers.options import (
    AS_THE_SETTINGS,
    Batch,
    Lease,
    Ordered,
    Retry,
    Shed,
    per_second,
    require_count,
    require_duration,
    require_value,
)
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
    retry: Retry | None = None,
    ordered: bool | Ordered = False,
    group_commit: int = 1,
    rate_limit: str | None = None,
    concurrency: int | None = None,
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
        retry: how often a failed message is tried, and when; default: as `INBOX` has it.
        ordered: handle the messages of one key one at a time, in order; different keys in parallel. True is `Ordered()`.
        group_commit: more than 1 runs so many calls in one transaction; when one raises, all are run again singly.
        rate_limit: like "2000/s", "100/m" or "5/h": most messages in that time, in all processes together.
        concurrency: most threads of one process that run this handler at a time; default: all of them.
        shed: which messages may be dropped, and above how many waiting ones.

    Raises:
        NotCallable: the function is a generator function, or `biz_id` is async; calling it would run nothing.
        TypeError: an option has a value of the wrong type, such as a number for a duration.
        ValueError: the topic cannot be one, the name is taken, an option is out of range, or two contradict each other; a
            function that takes two topics needs two names.
    """
    require_count("group_commit", group_commit)
    return _handling(
        topic,
        biz_id=biz_id,
        name=name,
        using=using,
        timeout=timeout,
        retry=retry,
        ordered=ordered,
        group_commit=group_commit,
        rate_limit=rate_limit,
        concurrency=concurrency,
        shed=shed,
    )


def batch_handler(
    topic: str,
    *,
    size: int = 100,
    wait: timedelta = timedelta(seconds=0.2),
    biz_id: BizId | str | None = None,
    name: str | None = None,
    using: str = DEFAULT_DB_ALIAS,
    timeout: timedelta | None = None,
    retry: Retry | None = None,
    rate_limit: str | None = None,
    concurrency: int | None = None,
    shed: Shed | None = None,
) -> Callable[[Function], Function]:
    """Have the decorated function handle the messages of `topic` in lists, the effect of each exactly once per biz-id.

    The function gets a list of up to `size` messages, in one transaction. When it raises, the list is rolled back and run again
    in halves, until the message that fails is alone.

    Args:
        size: the most messages of a list.
        wait: the longest wait for a list to fill, from its first message on.
        rate_limit: counts messages, not lists.

    The other arguments, and what is raised, are those of `idempotent_handler`.
    """
    return _handling(
        topic,
        biz_id=biz_id,
        name=name,
        using=using,
        timeout=timeout,
        retry=retry,
        batch=Batch(size=size, wait=wait),
        rate_limit=rate_limit,
        concurrency=concurrency,
        shed=shed,
    )


def leased_handler(
    topic: str,
    *,
    lease: Lease | None = None,
    biz_id: BizId | str | None = None,
    name: str | None = None,
    using: str = DEFAULT_DB_ALIAS,
    timeout: timedelta | None = None,
    retry: Retry | None = None,
    ordered: bool | Ordered = False,
    rate_limit: str | None = None,
    concurrency: int | None = None,
    shed: Shed | None = None,
) -> Callable[[Function], Function]:
    """Have the decorated function handle every message of `topic` under a lease, for effects outside the database.

    The function runs outside any transaction: at least once, never two at a time for one message, and not again after it has
    returned. See `Message.step`.

    Args:
        lease: how long a process may be silent before another one runs its message, and the longest run; default: `Lease()`.

    The other arguments, and what is raised, are those of `idempotent_handler`.
    """
    lease = Lease() if lease is None else lease
    require_value("lease", lease, Lease, "Lease(duration=timedelta(minutes=10))")
    return _handling(
        topic,
        biz_id=biz_id,
        name=name,
        using=using,
        timeout=timeout,
        retry=retry,
        ordered=ordered,
        lease=lease,
        rate_limit=rate_limit,
        concurrency=concurrency,
        shed=shed,
    )


def _handling(
    topic: str,
    *,
    biz_id: BizId | str | None,
    name: str | None,
    using: str,
    timeout: timedelta | None,
    retry: Retry | None,
    rate_limit: str | None,
    concurrency: int | None,
    shed: Shed | None,
    ordered: bool | Ordered = False,
    **others: Any,
) -> Callable[[Function], Function]:
    """What the decorators have in common. `others` are options of one of them, checked, as the handler has them."""
    if reason := why_no_topic(topic):
        raise ValueError(f"The topic {topic!r} cannot be handled: {reason}.")
    _refuse_mistakes(timeout=timeout, retry=retry, concurrency=concurrency, shed=shed)
    options: dict[str, Any] = {
        "timeout": timeout,
        "retry": retry or AS_THE_SETTINGS,
        "ordered": _order(ordered),
        "rate_limit": None if rate_limit is None else per_second(rate_limit),
        "concurrency": concurrency,
        "shed": shed,
        **others,
    }

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
            **options,
        )
        if reason := why_contradictory(handler):
            raise ValueError(f"The handler {known_as} cannot be registered: {reason}.")
        registry.add(handler)
        return function

    return decorate


def _refuse_mistakes(*, timeout: object, retry: object, concurrency: object, shed: object) -> None:
    if timeout is not None:
        require_duration("timeout", timeout)
    if retry is not None:
        require_value("retry", retry, Retry, "Retry(max_attempts=5)")
    if concurrency is not None:
        require_count("concurrency", concurrency)
    if shed is not None:
        require_value("shed", shed, Shed, "Shed(above=10_000)")


def _order(ordered: bool | Ordered) -> Ordered | None:
    if isinstance(ordered, bool):
        return Ordered() if ordered else None
    require_value("ordered", ordered, Ordered, 'Ordered(on_dead="skip")')
    return ordered


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
