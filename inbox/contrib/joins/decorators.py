"""The decorators, of a join, and of a request and its answer, which is a join, too; and the checks of what they declare.

A join is registered as a handler for its runs, and a handler for each topic that it waits for.

The run id of a request and its answer is the correlation id, which `outbox.request` gives to a request of its own. So an answer
that arrives before its request waits for it, copies of both are suppressed, and the timeout is the deadline of the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial, update_wrapper
from typing import Any, Literal

from asgiref.sync import async_to_sync
from django.apps import AppConfig
from django.core.checks import CheckMessage, Warning, register

from exactly_once.packages import name_of
from exactly_once.telemetry.tracing import OUTER_CORRELATION, caused_by, current_cause
from inbox.checks import errors_without_tables
from inbox.contrib.joins import Join
from inbox.contrib.joins.models import Run
from inbox.contrib.joins.runs import Definition, collect, gather
from inbox.contrib.joins.store import TOPIC
from inbox.errors import Reject
from inbox.handlers.decorator import (
    Function,
    as_identifier,
    database_of,
    kept_name,
    payload_classes,
    refuse_not_callable,
    registering,
    require_topics,
)
from inbox.handlers.handler import Handler
from inbox.handlers.kinds import Collector, Joined
from inbox.handlers.message import BizId, Message
from inbox.handlers.options import Retry, require_duration
from inbox.handlers.registry import registry


def joined_handler(
    *,
    all_of: Sequence[str],
    correlate: BizId | str | tuple[str, ...],
    deadline: timedelta | str,
    payload: Mapping[str, type[Any]] | None = None,
    on_missing: Literal["dead", "call"] = "dead",
    publishes: Sequence[str] = (),
    name: str | None = None,
    renamed_from: str | None = None,
    using: str | None = None,
    timeout: timedelta | str | None = None,
    retry: Retry | None = None,
    rate_limit: str | None = None,
    concurrency: int | None = None,
) -> Callable[[Function], Function]:
    """Handle a message of each of these topics with the decorated function, which gets a `Join` of them, once per run id.

    The function runs in a transaction on `using`, when all messages of the run have come.

    Args:
        all_of: the topics to wait for.
        correlate: the run id of a message, in the forms of `biz_id` of `idempotent_handler`.
        payload: classes of payloads by topic, as of `idempotent_handler`.
        deadline: how long a run waits for its other messages, counted from the arrival of the first.
        on_missing: what happens at the deadline: "dead" makes the run a dead letter, "call" calls the function with what has
            come, and with the others in `Join.missing`.
        publishes: the topics that the function publishes, for the system check that refuses joins that wait for themselves.

    The other arguments and the exceptions are those of `idempotent_handler`.
    """
    topics, published = require_topics("all_of", all_of), require_topics("publishes", publishes)
    as_identifier("correlate", correlate)
    kept, longest = kept_name(name, renamed_from), require_duration("deadline", deadline)

    def decorate(function: Function) -> Function:
        refuse_not_callable(function, "join")
        named = kept or name_of(function, "handler")
        join = Definition(name=named, using=database_of(using), topics=topics, deadline=longest, on_missing=on_missing)
        limits = {"timeout": timeout, "rate_limit": rate_limit, "concurrency": concurrency}
        _register(join, function, correlate, payload, publishes=published, retry=retry, **limits)
        return function

    return decorate


def correlated(
    *,
    request: str,
    answer: str,
    timeout: timedelta | str,
    payload: Mapping[str, type[Any]] | None = None,
    on_timeout: Callable[[Message], Any] | None = None,
    name: str | None = None,
    using: str | None = None,
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
        payload: classes of payloads by topic, as of `idempotent_handler`.
        on_timeout: called with the request if no answer has arrived in time, instead of the decorated function. Default: the
            request is a dead letter, and an operator decides.
        name: stable name of this handler; default: `<app label>.<function name>`.
        using: the database alias that the effect is written to.
        retry: the maximum attempts and the delays between them; default: the settings in `INBOX`.

    Raises:
        NotCallable: the function is a generator function, or cannot be called with two messages.
        TypeError: the timeout is neither a timedelta nor text, or `on_timeout` is not a function.
        ValueError: the timeout is not longer than zero, a topic is invalid, both are the same, or another handler has the name.
    """
    longest = require_duration("timeout", timeout)
    if on_timeout is not None and not callable(on_timeout):
        raise TypeError(f"on_timeout is {on_timeout!r}: it must be a function of the request.")

    def decorate(function: Function) -> Function:
        refuse_not_callable(function, "request", "answer")
        join = Definition(
            name=name or name_of(function, "handler"),
            using=database_of(using),
            topics=(request, answer),
            deadline=longest,
            on_missing="dead" if on_timeout is None else "call",
            refuses_late=True,
        )
        _register(join, _answering(join, function, on_timeout), lambda message: message.correlation_id, payload, retry=retry)
        return function

    return decorate


def _register(
    join: Definition,
    function: Callable[[Join], Any],
    correlate: BizId | str | tuple[str, ...],
    payload: Mapping[str, type[Any]] | None,
    **options: Any,
) -> None:
    register = partial(registering, biz_id=correlate, using=join.using)
    classes = payload_classes(join.topics, payload)
    for collector, topic in join.collectors.items():
        collecting = register([topic], name=collector, kind=Collector(collects_for=join.name), payload=classes.get(topic))
        collecting(update_wrapper(partial(collect, join), collect))
    kind = Joined(all_of=join.topics, given=partial(gather, join))
    register([TOPIC], name=join.name, kind=kind, **options)(function)


def _answering(join: Definition, function: Callable[..., Any], on_timeout: Callable[..., Any] | None) -> Callable[[Join], Any]:
    """The function of a request and its answer as the function of a join.

    It raises Reject if an operator has started the run without what it needs.
    """
    request, answer = join.topics

    def run(come: Join) -> Any:
        if request not in come.messages:
            raise Reject(f"No request has the correlation id {come.run_id} of this answer.")
        asked = come[request]
        # The chain in which the request was made.
        outer = asked.headers.get(OUTER_CORRELATION)
        with caused_by(replace(current_cause(), correlation_id=str(outer)) if outer else current_cause()):
            if answer in come.messages:
                return _synchronous(function)(asked, come[answer])
            if on_timeout is not None:
                return _synchronous(on_timeout)(asked)
        raise Reject("It has no answer, and its handler has no on_timeout= to call without one. Enter the missing answer.")

    return update_wrapper(run, function)


def _synchronous(function: Callable[..., Any]) -> Callable[..., Any]:
    return async_to_sync(function) if inspect.iscoroutinefunction(function) else function


@register()
def check_cycles(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox_joins.W001: a join that waits for a message which, as far as is declared, is published only after it has run."""
    return [
        Warning(
            f"The join {join.name} can never run, as far as is declared: it waits for {topic!r}, which only "
            f"{', '.join(sorted(names))} publishes, and that runs only after it.",
            hint="Remove the topic from all_of=, or correct the publishes= of these handlers. Silence this check if "
            "other code, such as a view, publishes the first of these messages.",
            id="inbox_joins.W001",
        )
        for join in _joins()
        for topic, names in _never_published(join)
    ]


@register()
def check_tables(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox_joins.E002: a join on a database that has no tables of joins."""
    return errors_without_tables(
        Run,
        [(f"The join {join.name}", join) for join in _joins()],
        what="tables of joins",
        hint="Its runs and its effect must be in the same database. Allow inbox_joins to be migrated there in the database "
        "routers, or set using= to another alias.",
        id="inbox_joins.E002",
    )


def _joins() -> list[Handler]:
    return [handler for handler in registry.all() if handler.kind.all_of]


def _never_published(join: Handler) -> Iterator[tuple[str, set[str]]]:
    """The topics of a join whose declared publishers all run after it, with these publishers."""
    after = {handler.name for handler in _after(join)}
    for topic in join.kind.all_of:
        publishers = {handler.name for handler in registry.all() if topic in handler.publishes}
        if publishers and publishers <= after:
            yield topic, publishers


def _after(join: Handler) -> list[Handler]:
    """The join, and the handlers of the messages that it publishes."""
    found = [join]
    for earlier in found:
        found += [
            handler
            for handler in registry.all()
            if handler not in found and {*earlier.publishes} & {*handler.topics, *handler.kind.all_of}
        ]
    return found
