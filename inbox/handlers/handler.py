"""A registered handler: its function, topic, database and options."""

import inspect
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import cached_property
from typing import Any
from uuid import UUID

from asgiref.sync import AsyncToSync

from exactly_once.wire.identity import origin
from exactly_once.wire.payloads import reader
from exactly_once.wire.text import fit
from inbox.conf import inbox_options
from inbox.errors import NotCallable
from inbox.handlers.kinds import PLAIN, Kind, Lease
from inbox.handlers.message import BizId, Message
from inbox.handlers.options import AS_THE_SETTINGS, Ordered, Retry, Shed, StartFrom
from inbox.handlers.timeouts import bounded, limits_of


@dataclass(frozen=True, kw_only=True)
class Handler:
    """A registered handler.

    Attributes:
        name: stable and unique in this project.
        topics: the topics it handles, through one queue, so that the order of a key holds across them.
        function: the user's code.
        biz_id: returns the biz-id to deduplicate on; None: the message's own biz-id.
        using: the database alias of its inbox row and its effect.
        timeout: the longest run of the function; None: unbounded.
        retry: the maximum attempts and the delays between them.
        retry_for: returns those of a message; None: `retry` is that of all.
        kind: how its messages are run.
        ordered: messages of one key are handled one at a time, in the order of publishing; None: in any order.
        rate_limit: the maximum number of messages per second in all processes together; None: unlimited.
        concurrency: the maximum number of threads of one process that run it at a time; None: the default of the process.
        shed: which messages may be dropped when too many wait; None: no message.
        publishes: the topics that it is declared to publish.
        start_from: since when it gets the messages that were published before it existed.
        payloads: the classes of its payloads, by topic; those of other topics are decoded JSON.
    """

    name: str
    topics: tuple[str, ...]
    function: Callable[..., Any]
    biz_id: BizId | None
    using: str
    timeout: timedelta | None = None
    retry: Retry = AS_THE_SETTINGS
    retry_for: Callable[[Message], Retry] | None = None
    kind: Kind = PLAIN
    ordered: Ordered | None = None
    rate_limit: float | None = None
    concurrency: int | None = None
    shed: Shed | None = None
    publishes: tuple[str, ...] = ()
    start_from: StartFrom = "now"
    payloads: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def identity(self) -> tuple[str, str, str]:
        """Function, topics and database. Two handlers with one name are the same if these are equal."""
        return origin(self.function), ", ".join(self.kind.all_of or self.topics), self.using

    @property
    def wants_past(self) -> bool:
        """Does it want messages that were published before it existed?"""
        return self.start_from != "now"

    @property
    def starts_at(self) -> datetime | None:
        """The instant since which it wants them; None for the first one."""
        return self.start_from if isinstance(self.start_from, datetime) else None

    @cached_property
    def is_stored_first(self) -> bool:
        """Are its messages stored before they are handled?"""
        return self.ordered is not None or not self.kind.is_called

    @cached_property
    def lease(self) -> Lease | None:
        """The terms of the lease under which the function runs outside any transaction; None: inside one."""
        return self.kind if isinstance(self.kind, Lease) else None

    @cached_property
    def may_follow(self) -> bool:
        """May its next message be read and begun in the round trip that commits the one before it?

        Not if the user's code reads it, which may query, or if it has a transaction of its own kind.
        """
        is_single = (self.kind is PLAIN or self.lease is not None) and not self.is_stored_first
        return is_single and not self.payloads and (self.biz_id is None or isinstance(self.biz_id, PayloadField))

    @cached_property
    def limits(self) -> Sequence[bytes]:
        """What bounds its transaction in PostgreSQL, after the first statement; nothing without a timeout. See `limits_of`."""
        runs = 1 if self.kind.gets_list else self.kind.size
        return () if self.timeout is None else limits_of(self.timeout, runs)

    @property
    def skips_dead(self) -> bool:
        """Does a key continue without a dead letter?"""
        return self.ordered is not None and self.ordered.on_dead == "skip"

    @property
    def partitions(self) -> int:
        """The number of its queues."""
        return 1 if self.ordered is None else self.ordered.partitions

    def call(self, *messages: Message) -> object:
        """Call the function with one message, or with a list for a batch handler or a join; returns its result.

        Raises:
            NotCallable: it returned an awaitable or an iterator, which the inbox does not run.
            HandlerTimeout: it took longer than `timeout`.
        """
        process = os.getpid()
        try:
            if self.timeout is None:
                return self._call(messages)
            with bounded(self.name, self.timeout, cancels_itself=isinstance(self.function, AsyncToSync)):
                return self._call(messages)
        finally:
            if os.getpid() != process:
                # A forked child process must not continue as a worker on the parent's connections.
                os._exit(1)

    def _call(self, messages: tuple[Message, ...]) -> object:
        function, given, hooks = self.function, self.kind.given, inbox_options().around
        around = [message for message in messages if self.kind.has_around(message)] if hooks else []
        result = _called_around(hooks, around, lambda: function(given(messages))) if around else function(given(messages))
        if result is not None and (inspect.isawaitable(result) or isinstance(result, Iterator | AsyncIterator)):
            if inspect.iscoroutine(result):
                result.close()
            raise NotCallable(
                f"The handler {self.name} returned {type(result).__name__}, which the inbox does not run, so its effect is "
                "missing. Decorate the async function itself, or await or exhaust the result inside the handler."
            )
        return result

    def typed(self, message: Message) -> Message:
        """The message with its payload as an instance of its class, if it has one.

        Raises:
            exactly_once.wire.payloads.Misfit: the payload does not fit.
            Exception: any exception of the user's class.
        """
        if message.topic not in self.payloads:
            return message
        return replace(message, payload=self.read_payload(message.topic, message.raw), _raw=message.raw)

    def read_payload(self, topic: str, given: Any) -> Any:
        """Decoded JSON as an instance of the class of this topic, if it has one. Raises as `typed`."""
        return reader(self.payloads[topic])(given) if topic in self.payloads else given

    def identify(self, message: Message) -> str:
        """The biz-id of `message`, fit to be stored.

        Raises:
            TypeError: the user's `biz_id` returned a value of another type, or "".
            Exception: any exception of the user's `biz_id`.
        """
        if self.biz_id is None:
            return message.biz_id
        return as_biz_id(self.biz_id(message))


def _called_around(hooks: Sequence[Callable[..., Any]], messages: Sequence[Message], call: Callable[[], object]) -> object:
    """`call()`, within a context manager of each hook of `INBOX["AROUND"]` for each message, in the order of the setting.

    An exception of a hook is raised as one of the handler. A hook cannot suppress the handler's exception, because the effect
    would be committed.
    """
    raised: list[BaseException] = []
    with ExitStack() as stack:
        try:
            for hook in hooks:
                for message in messages:
                    stack.enter_context(_entered(hook, message))
            return call()
        except BaseException as error:
            raised.append(error)
            raise
    raise raised[0]  # a hook has suppressed it


def _entered(hook: Callable[..., Any], message: Message) -> Any:
    manager = hook(message)
    if not (hasattr(manager, "__enter__") and hasattr(manager, "__exit__")):
        raise TypeError(
            f"INBOX['AROUND']: {hook.__module__}.{getattr(hook, '__qualname__', hook)} returned {manager!r}: it must return a "
            "context manager. Decorate it with @contextlib.contextmanager."
        )
    return manager


def as_biz_id(named: object) -> str:
    """The value that a user's `biz_id` returned, fit to be stored.

    Raises:
        TypeError: it identifies nothing.
    """
    return fit(_as_text(named))


def _as_text(named: object) -> str:
    if inspect.iscoroutine(named):
        named.close()
    if isinstance(named, bool) or not isinstance(named, str | int | UUID | Decimal | date) or named == "":
        raise TypeError(
            f"it returned {named!r}; a biz-id must be non-empty text, a whole number, a UUID, a Decimal or a date, so that "
            "unrelated messages do not share one"
        )
    return str.__str__(named) if isinstance(named, str) else str(named)


@dataclass(frozen=True)
class PayloadField:
    """A `biz_id` function that returns the field at a path of the payload as it was published, or several as a JSON array."""

    path: str | tuple[str, ...]

    def __call__(self, message: Message) -> object:
        if isinstance(self.path, str):
            return self._value(self.path, message)
        return json.dumps([_as_text(self._value(path, message)) for path in self.path], separators=(",", ":"))

    def _value(self, path: str, message: Message) -> object:
        return value_at(path, message.raw, "the payload has no field")


def value_at(path: str, given: object, missing: str) -> object:
    """The value at a path of names, "order.id". Raises LookupError, with `missing`, if there is none."""
    for name in path.split("."):
        if not isinstance(given, Mapping) or name not in given:
            raise LookupError(f"{missing} {path!r}")
        given = given[name]
    return given


def why_contradictory(handler: Handler) -> str | None:
    """Why these options contradict each other, with the remedy; None if they do not."""
    if handler.ordered is not None and handler.kind.size > 1:
        return (
            f"group_commit={handler.kind.size} runs several messages in one transaction, but an ordered handler runs one "
            "message of a key at a time; remove one of the two options"
        )
    if handler.ordered is not None and handler.shed is not None:
        return "shed drops messages, but an ordered handler must handle every message of a key; remove shed or ordered"
    if not handler.kind.is_called and (handler.retry.dead_on or handler.retry.retry_on):
        return "its messages are handled by clients, which raise no exceptions here; remove dead_on and retry_on from its retry"
    if handler.lease is not None and handler.timeout is not None and handler.timeout > handler.lease.limit:
        return (
            f"its timeout of {handler.timeout} is longer than the limit of its lease, {handler.lease.limit}, after which no "
            "outcome is stored; shorten the timeout, or extend the limit with Lease(limit=...)"
        )
    return None
