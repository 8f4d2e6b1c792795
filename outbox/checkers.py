"""Who knows what became of a prepared message: one function per topic, in an app's `callbacks.py`.

The idea is the transaction check of Apache RocketMQ: when the code that prepared a message has died, or cannot say, somebody
else is asked whether its business has happened.
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

from outbox.kernel.text import why_no_topic


class Answer(StrEnum):
    """What a checker says of the business of a prepared message."""

    COMMIT = "commit"
    """It has happened: publish the message."""
    ROLLBACK = "rollback"
    """It has not happened, and it has been made sure that it never will: drop the message."""
    UNKNOWN = "unknown"
    """Neither can be said now: ask again later."""


@dataclass(frozen=True, kw_only=True)
class HalfMessage:
    """What a checker is asked about.

    Attributes:
        id: the message id.
        topic, biz_id, key: as they were given to `prepare`.
        payload: decoded JSON.
        headers: as given.
        created_at: when it was prepared, by the database's clock.
        checks: how often a checker has answered "unknown" so far.
    """

    id: uuid.UUID
    topic: str
    biz_id: str
    key: str
    payload: Any
    headers: Mapping[str, Any]
    created_at: datetime
    checks: int


Checker = Callable[[HalfMessage], object]
Function = TypeVar("Function", bound=Callable[..., Any])


class Checkers:
    """The checkers of this process, by topic."""

    def __init__(self) -> None:
        self._by_topic: dict[str, Checker] = {}

    def add(self, topic: str, function: Checker) -> None:
        """Raises ValueError when another function is asked about this topic already."""
        known = self._by_topic.get(topic)
        if known is not None and _origin(known) != _origin(function):
            raise ValueError(
                f"Two checkers are registered for {topic!r}: {_origin(known)} and {_origin(function)}. They may contradict "
                "each other; keep one of them."
            )
        self._by_topic[topic] = function

    def remove(self, topic: str) -> None:
        self._by_topic.pop(topic, None)

    def of(self, topic: str) -> Checker | None:
        return self._by_topic.get(topic)

    def topics(self) -> list[str]:
        return list(self._by_topic)

    def ask(self, message: HalfMessage) -> Answer:
        """Ask the checker of its topic.

        Raises:
            TypeError: it said something that is no answer.
            Exception: whatever it raises.
        """
        answer = self._by_topic[message.topic](message)
        if not isinstance(answer, Answer):
            raise TypeError(f"it answered {answer!r}, which must be Answer.COMMIT, Answer.ROLLBACK or Answer.UNKNOWN")
        return answer


checkers = Checkers()


def checker(topic: str) -> Callable[[Function], Function]:
    """Have the decorated function asked about prepared messages of `topic` that nobody has decided about in time.

    It gets a `HalfMessage` and gives back an `Answer`. It runs in a relay process, outside any transaction, and may be asked
    several times, also at once by several processes. An exception, or anything else than an `Answer`, is no answer: it is
    logged, written to the message, not counted, and the checker is asked again. An `async def` is run to its end.

    Raises:
        ValueError: the topic cannot be one, or has another checker.
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
