"""The decorators that register a function as a handler: of one message, of a list, or of one message under a lease.

Handlers are discovered in each app's `handlers.py`. Deduplication uses the handler's name: a handler with a new name handles
every message again, so set `renamed_from=` when you rename a function.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import timedelta
from functools import partial, update_wrapper, wraps
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack

from asgiref.sync import async_to_sync
from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, router

from exactly_once.conf.settings import per_second
from exactly_once.packages import label_of, name_of
from exactly_once.wire.identity import origin
from exactly_once.wire.text import did_you_mean, why_no_topic, why_unfit
from inbox.deaths import SUFFIX
from inbox.errors import NotCallable
from inbox.handlers.handler import Handler, PayloadField, why_contradictory
from inbox.handlers.kinds import PLAIN, Batch, Group, Kind, Lease, OnDead
from inbox.handlers.message import BizId, Message
from inbox.handlers.options import (
    AS_THE_SETTINGS,
    Ordered,
    Retry,
    Shed,
    StartFrom,
    require_count,
    require_duration,
    require_start,
    require_value,
)
from inbox.handlers.registry import registry

Function = TypeVar("Function", bound=Callable[..., Any])
_P = ParamSpec("_P")
_Decorator = TypeVar("_Decorator", bound=Callable[..., Any])


class CommonOptions(TypedDict, total=False):
    """The options of all decorators, with the defaults of `registering`. `idempotent_handler` describes them."""

    biz_id: BizId | str | tuple[str, ...] | None
    payload: type[Any] | Mapping[str, type[Any]] | None
    name: str | None
    renamed_from: str | None
    using: str | None
    timeout: timedelta | str | None
    retry: Retry | Callable[[Message], Retry] | None
    rate_limit: str | None
    concurrency: int | None
    shed: Shed | None
    start_from: StartFrom
    on_dead: Callable[[Message], Any] | None


def registering(
    topics: Sequence[str],
    *,
    biz_id: BizId | str | tuple[str, ...] | None = None,
    payload: type[Any] | Mapping[str, type[Any]] | None = None,
    name: str | None = None,
    renamed_from: str | None = None,
    using: str | None = None,
    timeout: timedelta | str | None = None,
    retry: Retry | Callable[[Message], Retry] | None = None,
    rate_limit: str | None = None,
    concurrency: int | None = None,
    shed: Shed | None = None,
    start_from: StartFrom = "now",
    on_dead: Callable[[Message], Any] | None = None,
    ordered: bool | Ordered = False,
    kind: Kind = PLAIN,
    publishes: tuple[str, ...] = (),
) -> Callable[[Function], Function]:
    """Validate the common options and return the decorator."""
    _require_handleable(topics)
    kept = kept_name(name, renamed_from)
    limit = None if timeout is None else require_duration("timeout", timeout)
    _require_valid(retry=retry, concurrency=concurrency, shed=shed, on_dead=on_dead)
    require_start(start_from)
    make = partial(
        Handler,
        topics=tuple(topics),
        using=database_of(using),
        timeout=limit,
        retry=retry if isinstance(retry, Retry) else AS_THE_SETTINGS,
        retry_for=retry if callable(retry) else None,
        ordered=_as_ordered(ordered),
        rate_limit=None if rate_limit is None else per_second("rate_limit", rate_limit),
        concurrency=concurrency,
        shed=shed,
        start_from=start_from,
        kind=kind,
        publishes=publishes,
        payloads=payload_classes(topics, payload),
    )
    identify = None if biz_id is None else as_identifier("biz_id", biz_id)

    def decorate(function: Function) -> Function:
        refuse_not_callable(function, "messages" if kind.gets_list else "message")
        if inspect.iscoroutinefunction(biz_id):
            raise NotCallable(f"The biz_id of {origin(function)} is async: it must be a synchronous function of the message.")
        runnable: Callable[..., Any] = function
        if inspect.iscoroutinefunction(function):
            runnable = async_to_sync(as_coroutine(function, limit))
        handler_name = kept or name_of(function, "handler")
        if reason := why_unfit(handler_name):
            raise ValueError(f"The name {handler_name!r} cannot be the name of a handler: {reason}.")
        handler = make(name=handler_name, function=runnable, biz_id=identify)
        if reason := why_contradictory(handler):
            raise ValueError(f"The handler {handler_name} cannot be registered: {reason}.")
        if on_dead is not None:
            about = OnDead(dead_letters_of=handler_name)
            registering(topics, name=f"{handler_name}{SUFFIX}", using=handler.using, timeout=limit, kind=about)(on_dead)
        registry.add(handler)
        return function

    return decorate


def _takes_common_options(decorator: Callable[_P, _Decorator]) -> Callable[_P, _Decorator]:
    """Give `decorator`, for readers of its signature, the `CommonOptions` in place of its `**options`, and refuse others."""
    own, common = inspect.signature(decorator), inspect.signature(registering).parameters
    given = [parameter for parameter in own.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    signature = own.replace(parameters=[*given, *(common[name] for name in CommonOptions.__annotations__)])
    known = [parameter.name for parameter in signature.parameters.values() if parameter.kind is parameter.KEYWORD_ONLY]

    @wraps(decorator)
    def checked(*topics: _P.args, **options: _P.kwargs) -> _Decorator:
        if unknown := min(options.keys() - {*known}, default=""):
            close = _inside(unknown, options[unknown], known) or did_you_mean(unknown, known)
            raise TypeError(f"{decorator.__name__}() has no argument {unknown!r}. {close}".rstrip())
        return decorator(*topics, **options)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked


def _inside(name: str, value: object, known: Sequence[str]) -> str:
    """A sentence that puts a wrong argument into the value that has this field, such as `retry=Retry(max_attempts=3)`."""
    for option, kind in (("retry", Retry), ("ordered", Ordered), ("lease", Lease), ("shed", Shed)):
        if option in known and any(field.name == name for field in fields(kind)):
            return f"Write {option}={kind.__name__}({name}={value!r})."
    return ""


@_takes_common_options
def idempotent_handler(
    *topics: str,
    publishes: Sequence[str] = (),
    ordered: bool | Ordered = False,
    group_commit: int = 1,
    **options: Unpack[CommonOptions],
) -> Callable[[Function], Function]:
    """Handle every message of `topics` with the decorated function; its effect happens exactly once per topic and biz-id.

    The function runs in a transaction on `using` that also contains the inbox row. Returning means done. `RetryLater` defers
    the message, `Reject` makes it a dead letter, and any other exception is a failed attempt, which is retried. The decorator
    returns the function unchanged. An `async def` runs to completion on the thread that holds the transaction.

    Args:
        topics: the exact names of one topic or more. They share one queue, so `ordered` keeps the order of a key across them.
        publishes: the topics that the function publishes, for the system check that refuses joins that wait for themselves.
        biz_id: the biz-id that the message is deduplicated on: a function of the message, or the path of a field of its JSON
            payload ("order_id", "order.id"), or a tuple of paths, whose values become a JSON array; default: the message's own
            biz-id, else its id.
        payload: the class of `Message.payload`: a dataclass, a Pydantic model or a msgspec Struct; or such classes by topic. A
            payload that does not fit is a dead letter, and the function is not called. Default: decoded JSON.
        name: stable name of this handler, used for deduplication and for its queue; default: `<app label>.<function name>`.
        renamed_from: the name that this handler had before its function was renamed. It keeps that name, with its messages and
            its queue, so that old and new processes may run side by side. The same as `name`, so give one of them.
        using: the database alias that the effect is written to. Default: the one that the database routers choose for writes
            of `InboxMessage`; without routers "default".
        timeout: a run that takes longer is a failed attempt; default: unbounded.
        retry: the maximum attempts and the delays between them; or a function that returns them for a message, which is called
            when the message has failed, or may have used up its attempts; it must not query. Default, also of a function that
            fails: the settings in `INBOX`.
        ordered: handle the messages of one key one at a time, in order; different keys in parallel. True is `Ordered()`.
        group_commit: the number of calls that share one transaction; if one raises, each is run again in its own.
        rate_limit: the maximum number of messages per period in all processes together: "2000/s", "100/m" or "5/h".
        concurrency: the maximum number of threads per process that run this handler at a time; default: all but one, or all if
            the process has no other handler.
        shed: which messages may be dropped, and above how many waiting messages.
        start_from: since when a handler with a new name gets messages: "now", only those that are published once its queue
            exists; "beginning", before these all that the outbox's history has; a datetime, those of the history published
            since. The last two need the outbox in the database `using`.
        on_dead: a function of one message, called with each that has become a dead letter, whatever the reason, as a handler
            of its own with the name `<name>.on_dead`: in a transaction, once for each time that it dies, and again if it
            fails. `message.error` says how it died. A body that cannot be read is bytes.

    Raises:
        NotCallable: the function is a generator function, or `biz_id` is async, so a call would not run its body; or the
            function cannot be called with one message.
        TypeError: an option has a value of the wrong type, such as a number for a duration.
        ValueError: there is no topic, a topic is invalid or repeated, another handler has the name, an option is out of range,
            or two options contradict each other.
    """
    require_count("group_commit", group_commit)
    published = require_topics("publishes", publishes)
    kind = Group(size=group_commit) if group_commit > 1 else PLAIN
    return registering(topics, publishes=published, ordered=ordered, kind=kind, **options)


@_takes_common_options
def batch_handler(
    *topics: str, size: int = 100, wait: timedelta | str = timedelta(seconds=0.2), **options: Unpack[CommonOptions]
) -> Callable[[Function], Function]:
    """Handle the messages of `topics` in lists with the decorated function; each effect happens exactly once per biz-id.

    The function gets a list of up to `size` messages, in one transaction. If it raises, the list is rolled back and run again
    in halves, until the failing message is alone.

    Args:
        size: the maximum number of messages in a list.
        wait: the longest wait for a list to fill, counted from its first message.
        rate_limit: counts messages, not lists.

    The other arguments and the exceptions are those of `idempotent_handler`.
    """
    return registering(topics, kind=Batch(size=size, wait=wait), **options)


@_takes_common_options
def leased_handler(
    *topics: str, lease: Lease | None = None, ordered: bool | Ordered = False, **options: Unpack[CommonOptions]
) -> Callable[[Function], Function]:
    """Handle every message of `topics` under a lease with the decorated function, for effects outside the database.

    The function runs outside any transaction: at least once, never twice at the same time for one message, and not again after
    it has returned. See `Message.step`.

    Args:
        lease: the lease's duration, after which another process takes over, and the longest run; default: `Lease()`.

    The other arguments and the exceptions are those of `idempotent_handler`.
    """
    lease = Lease() if lease is None else lease
    require_value("lease", lease, Lease, "Lease(duration=timedelta(minutes=10))")
    return registering(topics, kind=lease, ordered=ordered, **options)


def database_of(using: str | None) -> str:
    """The alias of a handler: as given, or as the database routers decide for the messages of the inbox.

    "default" in a module that is imported before the models are.
    """
    if using is None and apps.models_ready and apps.is_installed("inbox"):
        return router.db_for_write(apps.get_model(label_of("inbox"), "InboxMessage"))
    return using or DEFAULT_DB_ALIAS


def as_identifier(option: str, given: Any) -> BizId:
    """The function of the message that an option stands for. Raises TypeError if it is neither that nor paths."""
    paths = (given,) if isinstance(given, str) else given
    if isinstance(paths, tuple) and paths and all(isinstance(path, str) and path for path in paths):
        return PayloadField(given if isinstance(given, str) else paths)
    if callable(given):
        function: BizId = given
        return function
    raise TypeError(
        f"{option} is {given!r}: it must be a function of the message, or the path of a payload field, or a tuple of paths."
    )


def payload_classes(topics: Sequence[str], payload: object) -> dict[str, type[Any]]:
    """The classes of an option, by topic. Raises TypeError or ValueError if they are none."""
    given = payload if isinstance(payload, Mapping) else {} if payload is None else dict.fromkeys(topics, payload)
    if unknown := sorted(given.keys() - {*topics}):
        raise ValueError(f"payload has the topics {unknown}, which this handler does not have. Its topics are {[*topics]}.")
    for kind in given.values():
        if not isinstance(kind, type):
            raise TypeError(
                f"payload is {kind!r}: it must be a dataclass, a Pydantic model or a msgspec Struct, or these by topic."
            )
    return dict(given)


def kept_name(name: str | None, renamed_from: str | None) -> str | None:
    """The name that was given to a handler, or that it keeps; None for the default one."""
    if name and renamed_from:
        raise ValueError(f"A handler keeps its old name: remove name={name!r}, or renamed_from={renamed_from!r}.")
    return name or renamed_from


def require_topics(option: str, topics: Sequence[str]) -> tuple[str, ...]:
    """The topics of an option. Raises TypeError or ValueError if they are none."""
    if isinstance(topics, str):
        raise TypeError(f"{option} is {topics!r}: it must be a list of topics, such as [{topics!r}].")
    for topic in topics:
        if reason := why_no_topic(topic):
            raise ValueError(f"{option} contains {topic!r}, which cannot be a topic: {reason}.")
    return tuple(topics)


def _require_handleable(topics: Sequence[object]) -> None:
    for topic in topics:
        if not isinstance(topic, str):
            given = f"The function {topic.__name__}()" if inspect.isfunction(topic) else repr(topic)
            raise TypeError(
                f"{given} is not the name of a topic: write it in parentheses after the decorator, as text, such as "
                '("shop.order.placed").'
            )
        if reason := why_no_topic(topic):
            raise ValueError(f"The topic {topic!r} cannot be handled: {reason}. Name each topic; there may be several.")
    if not topics or len({*topics}) < len(topics):
        raise ValueError(f"The topics are {[*topics]}: a handler needs at least one, and each may be given once.")


def refuse_not_callable(function: Callable[..., Any], *arguments: str) -> None:
    """Raises NotCallable if the function is a generator function, or does not accept these positional arguments."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise NotCallable(
            f"{origin(function)} is a generator function: a call would not run its body. Use return instead of yield."
        )
    with suppress(ValueError):  # some callables have no signature
        signature = inspect.signature(function, follow_wrapped=False)
        try:
            signature.bind(*arguments)
        except TypeError as error:
            called = f"the inbox calls it with ({', '.join(arguments)}): declare them"
            raise NotCallable(f"{origin(function)} has the parameters {signature}, but {called}.") from error


def _require_valid(*, retry: object, concurrency: object, shed: object, on_dead: object) -> None:
    if callable(retry):
        refuse_not_callable(retry, "message")
        if inspect.iscoroutinefunction(retry):
            raise NotCallable(f"The retry {origin(retry)} is async: it must be a synchronous function of the message.")
    elif retry is not None:
        require_value("retry", retry, Retry, "Retry(max_attempts=5)")
    if concurrency is not None:
        require_count("concurrency", concurrency)
    if shed is not None:
        require_value("shed", shed, Shed, "Shed(above=10_000)")
    if on_dead is not None and not callable(on_dead):
        also = _inside("on_dead", on_dead, ["ordered"]) if isinstance(on_dead, str) else ""
        raise TypeError(f"on_dead is {on_dead!r}: it must be a function of the message. {also}".rstrip())


def _as_ordered(ordered: bool | Ordered) -> Ordered | None:
    if isinstance(ordered, bool):
        return Ordered() if ordered else None
    require_value("ordered", ordered, Ordered, 'Ordered(on_dead="skip")')
    return ordered


def as_coroutine(function: Callable[..., Any], limit: timedelta | None) -> Callable[..., Coroutine[Any, Any, Any]]:
    """The coroutine function, cancelled after `limit`."""

    async def run(*args: Any, **kwargs: Any) -> Any:
        async with asyncio.timeout(limit.total_seconds() if limit else None):
            return await function(*args, **kwargs)

    return update_wrapper(run, function)
