"""Checkers of prepared messages: one function per topic, in an app's `callbacks.py`.

The idea is the transaction check of Apache RocketMQ: if the code that prepared a message has died, or does not know, the relay
asks the topic's checker whether the effect has happened.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar

from asgiref.sync import AsyncToSync, async_to_sync

from exactly_once.wire.text import why_no_topic


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

    id: uuid.UUID
    topic: str
    biz_id: str
    key: str
    payload: Any
    headers: Mapping[str, Any]
    created_at: datetime
    checks: int


Checker = Callable[[UndecidedMessage], object]
Function = TypeVar("Function", bound=Callable[..., Any])


class Checkers:
    """The checkers of this process, by topic."""

    def __init__(self) -> None:
        self._by_topic: dict[str, Checker] = {}

    def add(self, topic: str, function: Checker) -> None:
        """Raises ValueError if the topic has another checker."""
        known = self._by_topic.get(topic)
        if known is not None and _origin(known) != _origin(function):
            raise ValueError(
                f"Two checkers are registered for {topic!r}: {_origin(known)} and {_origin(function)}. They could contradict "
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
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{_origin(function)} is a generator function: calling it would run nothing. Use return.")
        checkers.add(topic, async_to_sync(function) if inspect.iscoroutinefunction(function) else function)
        return function

    return register


def _origin(function: Callable[..., Any]) -> str:
    inner = function.awaitable if isinstance(function, AsyncToSync) else function
    return f"{getattr(inner, '__module__', '?')}.{getattr(inner, '__qualname__', repr(inner))}"
