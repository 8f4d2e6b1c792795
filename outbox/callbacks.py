"""Functions of the project that a relay calls, in each app's `callbacks.py`: callbacks, and checkers of prepared messages.

A callback is called when a message is published or dead. The transaction that makes it so also writes a pending callback, a
row. So the relay calls the function if and only if that transaction committed, and repeats the call until it returns.
(RocketMQ's SendCallback exists in the sender's memory only, and is lost with it.) The rows identify a callback by its name.

A checker, one for a topic, is the transaction check of Apache RocketMQ: if the code that prepared a message has died, or does
not know, the relay asks the checker whether the effect has happened.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, TypeVar
from uuid import UUID

from asgiref.sync import async_to_sync

from exactly_once.packages import name_of
from exactly_once.wire.identity import origin
from exactly_once.wire.text import why_no_topic, why_unfit

Event = Literal["published", "dead"]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class SettledMessage:
    """The argument of a callback.

    Attributes:
        event: "published" or "dead".
        error: why it is dead, or "".
        state: its present state; a dead message may have been restored since.
        using: the alias of the outbox's database, on which the transaction of this call is open.
        id: the message id.
        topic: the topic.
        biz_id: the name of the business fact.
        key: its ordering key, or "".
        payload: decoded JSON; bytes if a Celery task was serialised in another format.
        headers: the headers given to `publish()`.
        correlation_id: the first message of the chain that this one belongs to, or "".
        causation_id: the message whose handler published this one, or "".
        attempts: the number of attempts, in its present state.
        created_at: when `publish()` wrote it, by the database's clock.
        settled_at: when it became published or dead, by the same clock.
        call: the number of this call of the function for this event, counted from 1.
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
"""A topic, an event, and the name of the callback to call."""


class Registry:
    """The callbacks of this process by name, and the topics and events of each."""

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
        """Raises ValueError if another function has the name."""
        known = self._functions.get(name)
        if known is not None and origin(known) != origin(function):
            raise ValueError(
                f"Two callbacks are called {name!r}: {origin(known)} and {origin(function)}. The pending calls of one would "
                "go to the other; give one of them another name=."
            )
        self._functions[name] = function
        self._wanted[topic, event, name] = None

    def remove(self, name: str) -> None:
        self._functions.pop(name, None)
        self._wanted = {wanted: None for wanted in self._wanted if wanted[2] != name}

    def call(self, name: str, message: SettledMessage) -> None:
        """Call the callback `name`.

        Raises:
            TypeError: it returned a coroutine, so nothing has run yet.
            Exception: the callback's own.
        """
        result = self._functions[name](message)
        if inspect.iscoroutine(result):
            result.close()
            raise TypeError("it returned a coroutine, which is never run; decorate the async function itself")


registry = Registry()


def on_published(topic: str, *, name: str | None = None) -> Callable[[Function], Function]:
    """Register the decorated function as a callback for every message of `topic` that the broker has confirmed.

    A relay process calls it with a `SettledMessage`, in a transaction on the outbox's database: its writes there take effect
    once. Its other effects happen at least once, because the relay calls it again after a crash and, with its retry delays,
    after every exception, until it returns.

    Args:
        topic: the exact topic.
        name: stable name of the callback; default: `<app label>.<function name>`. Its pending calls are stored under this name.

    Raises:
        TypeError: the function is a generator function; calling it would run nothing.
        ValueError: the topic is invalid, or the name is taken.
    """
    return _registering(topic, "published", name)


def on_dead(topic: str, *, name: str | None = None) -> Callable[[Function], Function]:
    """Register the decorated function as a callback for every message of `topic` that runs out of attempts; see `on_published`.

    It is called again for a message that was restored and is dead again.
    """
    return _registering(topic, "dead", name)


def _registering(topic: str, event: Event, name: str | None) -> Callable[[Function], Function]:
    if reason := why_no_topic(topic):
        raise ValueError(f"The topic {topic!r} cannot have callbacks: {reason}.")

    def decorate(function: Function) -> Function:
        called = synchronous(function)
        known_as = name or name_of(function, "callback")
        if reason := why_unfit(known_as):
            raise ValueError(f"The name {known_as!r} is not valid for a callback: {reason}.")
        registry.add(topic, event, known_as, called)
        return function

    return decorate


def synchronous(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for a thread of a relay: an `async def` is run to its end."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{origin(function)} is a generator function: calling it would run nothing. Use return.")
    return async_to_sync(function) if inspect.iscoroutinefunction(function) else function


class Answer(StrEnum):
    """A checker's answer about the effect of a prepared message."""

    COMMIT = "commit"
    """The effect has happened: publish the message."""
    ROLLBACK = "rollback"
    """The effect has not happened, and the checker has made sure that it never will: drop the message."""
    UNKNOWN = "unknown"
    """The checker does not know yet: ask again later."""


@dataclass(frozen=True, kw_only=True)
class UndecidedMessage:
    """The prepared message that a checker gets.

    Attributes:
        id: the message id.
        topic, biz_id, key: the arguments of `prepare`.
        payload: decoded JSON.
        headers: as given.
        created_at: when it was prepared, by the database's clock.
        checks: the number of answers "unknown" so far.
    """

    id: UUID
    topic: str
    biz_id: str
    key: str
    payload: Any
    headers: Mapping[str, Any]
    created_at: datetime
    checks: int


Checker = Callable[[UndecidedMessage], object]


class Checkers:
    """The checkers of this process, by topic."""

    def __init__(self) -> None:
        self._by_topic: dict[str, Checker] = {}

    def add(self, topic: str, function: Checker) -> None:
        """Raises ValueError if the topic has another checker."""
        known = self._by_topic.get(topic)
        if known is not None and origin(known) != origin(function):
            raise ValueError(
                f"Two checkers are registered for {topic!r}: {origin(known)} and {origin(function)}. They could contradict "
                "each other; remove one of them."
            )
        self._by_topic[topic] = function

    def remove(self, topic: str) -> None:
        self._by_topic.pop(topic, None)

    def of(self, topic: str) -> Checker | None:
        return self._by_topic.get(topic)

    def topics(self) -> list[str]:
        return list(self._by_topic)

    def ask(self, message: UndecidedMessage) -> Answer:
        """Ask the checker of its topic.

        Raises:
            TypeError: it returned something other than an `Answer`.
            Exception: the checker's own.
        """
        answer = self._by_topic[message.topic](message)
        if not isinstance(answer, Answer):
            raise TypeError(f"it answered {answer!r}, which must be Answer.COMMIT, Answer.ROLLBACK or Answer.UNKNOWN")
        return answer


checkers = Checkers()


def checker(topic: str) -> Callable[[Function], Function]:
    """Register the decorated function as the checker of `topic`. It is asked about messages that are not decided in time.

    It gets an `UndecidedMessage` and returns an `Answer`. It runs in a relay process, outside any transaction, and may be
    called several times, also by several processes at once. If it raises, or returns anything other than an `Answer`, the
    relay logs that, writes it to the message, does not count it, and asks again. An `async def` is run to its end.

    Raises:
        ValueError: the topic is invalid, or has another checker.
        TypeError: it is a generator function; calling it would run nothing.
    """
    if reason := why_no_topic(topic):
        raise ValueError(f"The topic {topic!r} cannot be checked: {reason}.")

    def register(function: Function) -> Function:
        checkers.add(topic, synchronous(function))
        return function

    return register
