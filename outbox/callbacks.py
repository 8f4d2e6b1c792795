"""Callbacks: functions of the project that are told what became of a message.

They live in each app's `callbacks.py`. That one is to be called is a row, written in the transaction in which the message
became published or dead, so it is called if and only if that was committed, and again until it returns. (RocketMQ's
SendCallback lives in the memory of the sender and is lost with it.) A callback is known by its name, which those rows keep.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeVar
from uuid import UUID

from asgiref.sync import async_to_sync
from django.apps import apps

from outbox.kernel.text import why_no_topic, why_unfit

Event = Literal["published", "dead"]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class SettledMessage:
    """What a callback gets.

    Attributes:
        event: what became of the message: "published" or "dead".
        error: why it is dead, or "".
        state: what it is now; a dead one may have been restored since.
        using: the alias of the outbox's database, which the transaction of this call is open on.
        id: the message id.
        topic: what it is about.
        biz_id: the business's name of the fact.
        key: its ordering key, or "".
        payload: decoded JSON; bytes, when a Celery task was serialised in another way.
        headers: those that it was published with.
        correlation_id: the first message of the chain that this one belongs to, or "".
        causation_id: the message whose handler published this one, or "".
        attempts: how often it was tried, in the state it has now.
        created_at: when `publish()` wrote it, by the database's clock.
        settled_at: when it became published or dead, by the same clock.
        call: which call of this function for this event this is, counted from 1.
    """

    event: Event
    error: str
    state: str
    using: str
    id: UUID
    topic: str
    biz_id: str
    key: str
    payload: Any
    headers: Mapping[str, Any]
    correlation_id: str
    causation_id: str
    attempts: int
    created_at: datetime
    settled_at: datetime
    call: int


Wanted = tuple[str, Event, str]
"""A topic, an event, and the name of the callback that is to be told."""


class Registry:
    """The callbacks of this process, by name, and what each wants to be told."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self._wanted: dict[Wanted, None] = {}

    def __bool__(self) -> bool:
        return bool(self._functions)

    def __iter__(self) -> Iterator[Wanted]:
        return iter(self._wanted)

    @property
    def names(self) -> list[str]:
        return list(self._functions)

    def add(self, topic: str, event: Event, name: str, function: Callable[..., Any]) -> None:
        """Raises ValueError when another function has the name already."""
        known = self._functions.get(name)
        if known is not None and _origin(known) != _origin(function):
            raise ValueError(
                f"Two callbacks are called {name!r}: {_origin(known)} and {_origin(function)}. What one of them is still to be "
                "told, the other would be; give one of them another name=."
            )
        self._functions[name] = function
        self._wanted[topic, event, name] = None

    def remove(self, name: str) -> None:
        self._functions.pop(name, None)
        self._wanted = {wanted: None for wanted in self._wanted if wanted[2] != name}

    def call(self, name: str, message: SettledMessage) -> None:
        """Have the callback `name` told.

        Raises:
            TypeError: it returned something that is still to be run, so nothing has happened yet.
            Exception: whatever it raises.
        """
        function = self._functions[name]
        result = (async_to_sync(function) if inspect.iscoroutinefunction(function) else function)(message)
        if inspect.iscoroutine(result):
            result.close()
            raise TypeError("it returned a coroutine, which nobody would run; decorate the async function itself")


registry = Registry()


def on_published(topic: str, *, name: str | None = None) -> Callable[[Function], Function]:
    """Have the decorated function told of every message of `topic` that the broker has confirmed.

    A relay process calls it, with a `SettledMessage`, in a transaction on the outbox's database: what it writes there has its
    effect once. Anything else it does at least once, because it is called again after a crash and, with the relay's back-off,
    after every exception, until it returns.

    Args:
        topic: exactly this one.
        name: stable name of the callback; default: `<app label>.<function name>`. What it is still to be told rests on it.

    Raises:
        TypeError: the function is a generator function; calling it would run nothing.
        ValueError: the topic cannot be one, or the name is taken.
    """
    return _registering(topic, "published", name)


def on_dead(topic: str, *, name: str | None = None) -> Callable[[Function], Function]:
    """Have the decorated function told of every message of `topic` that has run out of attempts; see `on_published`.

    A message that was restored and died again is told of again.
    """
    return _registering(topic, "dead", name)


def _registering(topic: str, event: Event, name: str | None) -> Callable[[Function], Function]:
    if reason := why_no_topic(topic):
        raise ValueError(f"The topic {topic!r} cannot have callbacks: {reason}.")

    def decorate(function: Function) -> Function:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{_origin(function)} is a generator function: calling it would run nothing. Use return.")
        known_as = name or _default_name(function)
        if reason := why_unfit(known_as):
            raise ValueError(f"The name {known_as!r} cannot be a callback's: {reason}.")
        registry.add(topic, event, known_as, function)
        return function

    return decorate


def _default_name(function: Callable[..., Any]) -> str:
    if not hasattr(function, "__name__"):
        raise ValueError(f"{function!r} has no name of its own to be known by: give the callback a name=.")
    config = apps.get_containing_app_config(function.__module__)
    return f"{config.label if config else function.__module__}.{function.__name__}"


def _origin(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
