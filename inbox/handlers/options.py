"""The values of a handler's options.

Each is a frozen dataclass that validates its values when it is created. So a mistake is found when the handler's module is
imported, not when the first message fails.

Options that belong together are one value; an independent option is a plain argument of the decorator. Where the contract of
the function differs, the decorator differs: `@batch_handler` passes a list, `@leased_handler` runs outside of a transaction. So
most meaningless combinations cannot be written, and a type checker knows what the function gets. With flat arguments a third of
them would have a meaning only beside another one.

A duration is a `timedelta`, or text such as "90s": a number may mean seconds or minutes. A rate is a text such as "10/s",
because Python has no type for it. A deferral is bounded where it is raised (`RetryLater(give_up_after=…)`): only that code
knows how long it makes sense to wait.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from math import inf
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, cast

from exactly_once.wire.durations import parse_duration
from exactly_once.wire.retry import RetryPolicy
from inbox.errors import Reject, RetryLater, TransactionEnded

if TYPE_CHECKING:
    from inbox.handlers.message import Message

_Default = TypeVar("_Default", bound=timedelta | None)
_DECIDED = (RetryLater, Reject, TransactionEnded)
"""Exceptions whose outcome depends on no policy."""


def require_duration(option: str, given: object) -> timedelta:
    """A positive duration, which may be given as text.

    Raises:
        TypeError: it is neither a timedelta nor text.
        ValueError: it is zero or negative, or text that is not a duration.
    """
    value = parse_duration(option, given)
    if value <= timedelta():
        raise ValueError(f"{option} is {value}: it must be longer than zero, such as timedelta(seconds=30).")
    return value


class DurationField(Generic[_Default]):
    """A field of a frozen dataclass for what `require_duration` takes, or for its default. It is read as a `timedelta`."""

    def __init__(self, default: _Default) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> timedelta | _Default:
        return cast("timedelta | _Default", self._default if instance is None else instance.__dict__[self._name])

    def __set__(self, instance: object, value: timedelta | str | _Default) -> None:
        instance.__dict__[self._name] = value if value is self._default else require_duration(self._name, value)


def require_count(option: str, value: object) -> None:
    """Require a whole number of 1 or more.

    Raises:
        TypeError: it is not a whole number.
        ValueError: it is less than 1.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{option} is {value!r}: it must be a whole number, such as 2.")
    if value < 1:
        raise ValueError(f"{option} is {value}: it must be 1 or more.")


def _require_factor(value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"factor is {value!r}: it must be a number, such as 2.")
    if not 1 <= value < inf:
        raise ValueError(f"factor is {value}: it must be 1 or more. 1 means the same delay after every failure.")


def require_value(option: str, value: object, kind: type, example: str) -> None:
    """Require a value of one class of this module.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{option} is {value!r}: it must be a value of the class {kind.__name__}, such as {example}.")


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """The delays between failed attempts. An omitted value is taken from `INBOX`.

    Attributes:
        base: the delay after the first failed attempt; default: the first of BACKOFF.
        factor: multiplies the delay after each further failure; 1 or more; default: 2.5.
        cap: the longest delay; default: the second of BACKOFF, or `base` if that is longer.

    Raises:
        TypeError: a delay is neither a timedelta nor text, or `factor` is not a number.
        ValueError: a delay is not longer than zero, `factor` is less than 1, or `cap` is shorter than `base`.
    """

    base: DurationField[None] = DurationField(None)
    factor: float | None = None
    cap: DurationField[None] = DurationField(None)

    def __post_init__(self) -> None:
        if self.factor is not None:
            _require_factor(self.factor)
        if self.base is not None and self.cap is not None and self.cap < self.base:
            raise ValueError(f"cap is {self.cap}, shorter than base, {self.base}: make it at least as long.")


@dataclass(frozen=True, kw_only=True)
class Retry:
    """The maximum attempts and the delays between them. An omitted value is taken from `INBOX`.

    `dead_on` and `retry_on` apply to subclasses, too. If an exception belongs to several of their classes, the most specific
    one decides.

    Attributes:
        max_attempts: the maximum number of attempts, including the first; default: MAX_ATTEMPTS.
        backoff: the delays between them.
        dead_on: the exceptions after which a message is a dead letter at once.
        retry_on: the exceptions with a policy of their own. What it omits is taken from this one. The attempts are those of the
            message, whatever they raised.

    Raises:
        TypeError: `max_attempts` is not a whole number, `backoff` is not a Backoff, `dead_on` contains something else than
            classes of exceptions, or `retry_on` maps something else than these to policies.
        ValueError: `max_attempts` is less than 1; a class is in both `dead_on` and `retry_on`, or decides for itself; or a
            policy in `retry_on` has exceptions of its own.
    """

    max_attempts: int | None = None
    backoff: Backoff = Backoff()
    dead_on: Sequence[type[BaseException]] = ()
    retry_on: Mapping[type[BaseException], Retry] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.max_attempts is not None:
            require_count("max_attempts", self.max_attempts)
        require_value("backoff", self.backoff, Backoff, "Backoff(base=timedelta(seconds=10), factor=2)")
        if not isinstance(self.dead_on, list | tuple):
            raise TypeError(f"dead_on is {self.dead_on!r}: it must be a list of exceptions, such as [ValueError].")
        if not isinstance(self.retry_on, Mapping):
            raise TypeError(
                f"retry_on is {self.retry_on!r}: it must map exceptions to policies, such as "
                "{TimeoutError: Retry(max_attempts=20)}."
            )
        object.__setattr__(self, "dead_on", tuple(self.dead_on))
        object.__setattr__(self, "retry_on", dict(self.retry_on))
        for kind in self.dead_on:
            _require_undecided("dead_on", kind)
        for kind, policy in self.retry_on.items():
            _require_undecided("retry_on", kind)
            require_value(f"retry_on[{kind.__name__}]", policy, Retry, "Retry(max_attempts=20)")
            if policy.dead_on or policy.retry_on:
                raise ValueError(
                    f"retry_on[{kind.__name__}] has dead_on or retry_on of its own: move them to the outer Retry, where the "
                    "most specific class decides."
                )
            if kind in self.dead_on:
                raise ValueError(f"{kind.__name__} is in both dead_on and retry_on: remove it from one of them.")

    def after(self, error: BaseException, default: RetryPolicy) -> RetryPolicy:
        """The policy of an attempt that raised `error`."""
        own = self.over(default)
        for kind in type(error).__mro__ if self.dead_on or self.retry_on else ():
            if kind in self.dead_on:
                return replace(own, max_attempts=1)
            if kind in self.retry_on:
                return self.retry_on[kind].over(own)
        return own

    def most_attempts(self, default: RetryPolicy) -> int:
        """The maximum attempts of a message, whatever they raise."""
        own = self.over(default)
        return max([own.max_attempts, *(policy.over(own).max_attempts for policy in self.retry_on.values())])

    def over(self, default: RetryPolicy) -> RetryPolicy:
        """This policy, with omitted values taken from `default`."""
        if self == AS_THE_SETTINGS:
            return default
        base, factor, cap = self.backoff.base, self.backoff.factor, self.backoff.cap
        base = default.base if base is None else base
        return RetryPolicy(
            max_attempts=default.max_attempts if self.max_attempts is None else self.max_attempts,
            base=base,
            factor=default.factor if factor is None else factor,
            cap=max(default.cap, base) if cap is None else cap,
        )


AS_THE_SETTINGS = Retry()


def _require_undecided(option: str, kind: object) -> None:
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        raise TypeError(f"{option} contains {kind!r}: it must be the class of an exception, such as ValueError.")
    if decided := [own for own in _DECIDED if issubclass(kind, own)]:
        raise ValueError(f"{option} contains {kind.__name__}, a {decided[0].__name__}, which no policy applies to: remove it.")


@dataclass(frozen=True, kw_only=True)
class Ordered:
    """The messages of one key are handled one at a time, in order; different keys in parallel.

    Attributes:
        on_dead: "block": the later messages of a dead letter's key wait until an operator retries or skips it. "skip": they
            continue without it.
        partitions: the number of queues that the keys are distributed to, by consistent hash (RabbitMQ).

    Raises:
        TypeError: `partitions` is not a whole number.
        ValueError: `on_dead` has another value, or `partitions` is less than 1.
    """

    on_dead: Literal["block", "skip"] = "block"
    partitions: int = 1

    def __post_init__(self) -> None:
        if self.on_dead not in {"block", "skip"}:
            raise ValueError(f"on_dead is {self.on_dead!r}: it must be 'block' or 'skip'.")
        require_count("partitions", self.partitions)


StartFrom = Literal["beginning", "now"] | datetime
"""What a new handler gets of the messages that were published before: all, none, or those since an instant."""


def past_in_words(since: datetime | None) -> str:
    """What a new handler gets before new messages, for people. None: since the beginning."""
    all_of_it = "all messages of its topics in the outbox's history"
    return all_of_it if since is None else f"{all_of_it} since {since.isoformat(' ', 'seconds')}"


def require_start(start_from: object) -> None:
    """
    Raises:
        TypeError: it is neither text nor an instant.
        ValueError: it is another text, or an instant without a time zone.
    """
    if isinstance(start_from, datetime):
        if start_from.tzinfo is None:
            raise ValueError(f"start_from is {start_from!r}: it must have a time zone, as datetime(2026, 3, 1, tzinfo=UTC).")
    elif start_from not in ("beginning", "now"):
        kind = ValueError if isinstance(start_from, str) else TypeError
        raise kind(f"start_from is {start_from!r}: it must be 'beginning', 'now' or a datetime with a time zone.")


def _always(message: Message) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Shed:
    """Load shedding: while more than `above` messages wait for a handler, those that are `droppable` are not handled.

    Each dropped message is stored in the state `shed`, with the reason.

    Attributes:
        above: the number of messages in the handler's queue above which messages are dropped; dropping ends at 90 % of it.
        droppable: returns True if this message may be dropped. An exception counts as False.

    Raises:
        TypeError: `above` is not a whole number, or `droppable` is not a synchronous function.
        ValueError: `above` is less than 1.
    """

    above: int = 100_000
    droppable: Callable[[Message], bool] = field(default=_always, hash=False)

    def __post_init__(self) -> None:
        if not callable(self.droppable):
            raise TypeError(f"droppable is {self.droppable!r}: it must be a function of the message.")
        if inspect.iscoroutinefunction(self.droppable):
            raise TypeError("droppable is async: it must be a synchronous function of the message.")
        require_count("above", self.above)
