"""Registering a join: a handler for its runs, and a handler for each topic it waits for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, update_wrapper
from typing import Any, Literal

from asgiref.sync import sync_to_async

from inbox.handlers.decorator import Function, default_name, refuse_generator, registering
from inbox.handlers.message import BizId, Message
from inbox.handlers.options import Retry, require_duration
from inbox.joins.collecting import Definition, collect, finish, gather
from inbox.joins.store import TOPIC


def joining(
    topics: tuple[str, ...],
    *,
    correlate: BizId | str | None,
    deadline: timedelta | None,
    on_missing: Literal["dead", "call"],
    publishes: tuple[str, ...],
    name: str | None,
    using: str,
    timeout: timedelta | None,
    retry: Retry | None,
    rate_limit: str | None,
    concurrency: int | None,
    refuses_late: bool = False,
) -> Callable[[Function], Function]:
    """The decorator that `idempotent_handler(all_of=...)` returns.

    Args:
        refuses_late: see `collecting.Definition`. The others: see `idempotent_handler`.

    Raises:
        TypeError: the deadline is not a timedelta.
        ValueError: see `idempotent_handler`.
    """
    if len({*topics}) < len(topics):
        raise ValueError(f"all_of is {list(topics)}: a run has one message of each topic, so each may be listed once.")
    if TOPIC in topics:
        raise ValueError(f"all_of contains {TOPIC!r}, which is the topic of the runs themselves.")
    if correlate is None:
        raise ValueError("A join needs correlate=: the payload field, or the function of a message, that gives the run id.")
    if deadline is None:
        raise ValueError("A join needs deadline=: how long a run waits for its other messages, such as timedelta(hours=2).")
    require_duration("deadline", deadline)
    if on_missing not in {"dead", "call"}:
        raise ValueError(f"on_missing is {on_missing!r}: it must be 'dead' or 'call'.")

    def decorate(function: Function) -> Function:
        refuse_generator(function)
        named = name or default_name(function)
        join = Definition(
            name=named, using=using, topics=topics, deadline=deadline, on_missing=on_missing, refuses_late=refuses_late
        )
        for topic in join.topics:
            of_a_part = registering(topic, biz_id=correlate, name=f"{named}/{topic}", using=using, collects=True)
            of_a_part(update_wrapper(partial(collect, join), collect))
        of_a_run = registering(
            TOPIC,
            all_of=join.topics,
            publishes=publishes,
            biz_id=correlate,
            name=named,
            using=using,
            timeout=timeout,
            retry=retry,
            rate_limit=rate_limit,
            concurrency=concurrency,
        )
        of_a_run(_of_messages(join, function))
        return function

    return decorate


def _of_messages(join: Definition, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a join as a function of messages."""

    async def run_async(given: Sequence[Message]) -> Any:
        result = await function(await sync_to_async(gather)(join, given))
        await sync_to_async(finish)(join, given)
        return result

    def run(given: Sequence[Message]) -> Any:
        result = function(gather(join, given))
        finish(join, given)
        return result

    return update_wrapper(run_async if inspect.iscoroutinefunction(function) else run, function)
