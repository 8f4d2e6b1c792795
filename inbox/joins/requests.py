"""A request and its answer: a join of the service's own request message and the message that answers it.

The run id is the correlation id, which `outbox.request` gives to a request of its own. So an answer that arrives before its
request waits for it, copies of both are suppressed, and the timeout is the deadline of the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import update_wrapper
from typing import Any

from django.db import DEFAULT_DB_ALIAS

from exactly_once.wire.context import OUTER_CORRELATION, caused_by, current_cause
from inbox.errors import Reject
from inbox.handlers.decorator import Function, default_name
from inbox.handlers.message import Message
from inbox.handlers.options import Retry, require_duration
from inbox.joins.join import Join
from inbox.joins.registering import joining


def correlated(
    *,
    request: str,
    answer: str,
    timeout: timedelta,
    on_timeout: Callable[[Message], Any] | None = None,
    name: str | None = None,
    using: str = DEFAULT_DB_ALIAS,
    retry: Retry | None = None,
) -> Callable[[Function], Function]:
    """Handle the answer of each request with the decorated function, which gets the request and the answer, once per request.

    The function runs in a transaction on `using`, as that of any join. What it publishes continues the chain in which the
    request was made. A late answer, after `on_timeout` has run, is a dead letter.

    Args:
        request: the topic that this service publishes with `outbox.request`, and no other service.
        answer: the topic of the answers. An answer has the correlation id of its request.
        timeout: how long a request waits for its answer, counted from its arrival in this handler's inbox. An answer that is
            stored then and not handled yet is waited for.
        on_timeout: called with the request if no answer has arrived in time, instead of the decorated function. Default: the
            request is a dead letter, and an operator decides.
        name: stable name of this handler; default: `<app label>.<function name>`.
        using: the database alias that the effect is written to.
        retry: the maximum attempts and the delays between them; default: the settings in `INBOX`.

    Raises:
        NotCallable: the function is a generator function.
        TypeError: the timeout is not a timedelta, or `on_timeout` is not a function of the same kind, async or not.
        ValueError: the timeout is not longer than zero, a topic is invalid, both are the same, or another handler has the name.
    """
    require_duration("timeout", timeout)
    if on_timeout is not None and not callable(on_timeout):
        raise TypeError(f"on_timeout is {on_timeout!r}: it must be a function of the request.")

    def decorate(function: Function) -> Function:
        if on_timeout is not None and inspect.iscoroutinefunction(on_timeout) != inspect.iscoroutinefunction(function):
            raise TypeError("The handler and its on_timeout must both be async functions, or both be synchronous.")
        join = joining(
            (request, answer),
            correlate=_correlation_id,
            deadline=timeout,
            on_missing="dead" if on_timeout is None else "call",
            publishes=(),
            name=name or default_name(function),
            using=using,
            timeout=None,
            retry=retry,
            rate_limit=None,
            concurrency=None,
            refuses_late=True,
        )
        join(_of_a_join(request, answer, function, on_timeout))
        return function

    return decorate


def _correlation_id(message: Message) -> str:
    return message.correlation_id


def _of_a_join(
    request: str, answer: str, function: Callable[..., Any], on_timeout: Callable[[Message], Any] | None
) -> Callable[[Join], Any]:
    """The function of a request and its answer as the function of a join."""

    def messages_of(join: Join) -> tuple[Message, Message | None]:
        if request not in join.messages:
            raise Reject(f"No request has the correlation id {join.run_id} of this answer.")
        if answer not in join.messages and on_timeout is None:
            raise Reject("It has no answer, and its handler has no on_timeout= to call without one. Enter the missing answer.")
        return join[request], join.messages.get(answer)

    def call(asked: Message, answered: Message | None) -> Any:
        return function(asked, answered) if answered or on_timeout is None else on_timeout(asked)

    def run(join: Join) -> Any:
        asked, answered = messages_of(join)
        with caused_by(_continuing(asked)):
            return call(asked, answered)

    async def run_async(join: Join) -> Any:
        asked, answered = messages_of(join)
        with caused_by(_continuing(asked)):
            return await call(asked, answered)

    return update_wrapper(run_async if inspect.iscoroutinefunction(function) else run, function)


def _continuing(asked: Message) -> Any:
    outer = asked.headers.get(OUTER_CORRELATION)
    return replace(current_cause(), correlation_id=str(outer)) if outer else current_cause()
