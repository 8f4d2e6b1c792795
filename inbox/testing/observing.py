"""This project's handlers as the test helpers run them: observed, and without limits."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from inbox.errors import RetryLater
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.states import State

Around = Callable[[Handler, tuple[Message, ...], Callable[[], object]], object]
"""Gets the handler, its messages, and the call to make."""


class HandlerFailed(AssertionError):
    """A message was not handled although its handler raised no exception: the inbox refused it, or could not commit."""


@dataclass(frozen=True, kw_only=True)
class _ObservedHandler(Handler):
    around: Around

    def call(self, *messages: Message) -> object:
        return self.around(self, messages, lambda: super(_ObservedHandler, self).call(*messages))


def observed(handler: Handler, around: Around) -> Handler:
    """The handler with `around` called for each run; without rate limit, concurrency limit and load shedding."""
    options = {field.name: getattr(handler, field.name) for field in fields(Handler)}
    return _ObservedHandler(**{**options, "rate_limit": None, "concurrency": None, "shed": None}, around=around)


def registered(handler: Callable[..., Any] | str, topic: str | None = None) -> Handler:
    """The handler of `topic` with this function or name.

    Raises:
        LookupError: there is none.
        ValueError: the function handles several topics, and `topic` does not say which.
    """
    known = [one for one in registry.all() if handler in (one.name, one.function, *_decorated(one))]
    selected = [one for one in known if topic in {None, *one.topics, *one.kind.all_of}]
    if len(selected) == 1:
        return selected[0]
    topics = ", ".join(sorted(repr(topic) for one in known for topic in one.topics))
    if selected:
        raise ValueError(
            f"{handler!r} handles several topics, {topics}: pass make_message(topic, payload), or the name of the handler."
        )
    if known:
        raise LookupError(f"{handler!r} handles {topics}, but the topic of the message is {topic!r}.")
    names = ", ".join(sorted(repr(one.name) for one in registry.all()))
    raise LookupError(
        f"{handler!r} is not a handler: decorate the function with @idempotent_handler(), or call it directly. Handlers: "
        f"{names or 'none'}."
    )


def _decorated(handler: Handler) -> list[object]:
    """The decorated function of an `async def` or of a join, which are wrapped, and that of `correlated` twice."""
    functions: list[object] = [getattr(getattr(handler.function, "awaitable", None), "__wrapped__", handler.function)]
    while handler.kind.all_of and (wrapped := getattr(functions[-1], "__wrapped__", None)):
        functions.append(wrapped)
    return functions


class Failures:
    """Collects why messages were not handled by the handlers that `watched` returns."""

    def __init__(self) -> None:
        self._raised: dict[tuple[str, str], BaseException | None] = {}

    def watched(self, handlers: Iterable[Handler] | None = None) -> list[Handler]:
        """These handlers, or all handlers of this project, observed."""
        return [observed(handler, self._run) for handler in (registry.all() if handlers is None else handlers)]

    @contextmanager
    def raising(self, handlers: Iterable[Handler] | None = None) -> Iterator[None]:
        """At the end of the block, raise the first failure of a message of these handlers, or of any handler.

        All messages of the block have been run by then. RetryLater is not a failure.

        Raises:
            Exception: what the handler raised.
            HandlerFailed: the handler raised no exception, but the message is not handled.
        """
        selected = registry.all() if handlers is None else list(handlers)
        before = {_outcome(row) for row in _failed(selected)}
        yield
        failures = [failure for row in _failed(selected) if _outcome(row) not in before if (failure := self._failure(row))]
        if failures:
            first, *others = failures
            if others:
                first.add_note(
                    f"Other messages that were not handled: {len(others)}; see inbox.testing.ReceivedMessage.last_error."
                )
            raise first

    def _run(self, handler: Handler, messages: tuple[Message, ...], call: Callable[[], object]) -> object:
        raised = None
        try:
            return call()
        except BaseException as error:
            raised = error
            raise
        finally:
            self._raised |= {(handler.name, message.id): raised for message in messages}

    def _failure(self, row: InboxMessage) -> BaseException | None:
        error = self._raised.get((row.handler, row.message_id))
        if isinstance(error, RetryLater) and row.state == State.RETRYING:
            return None
        where = f"{row.handler}, message {row.message_id}, biz-id {row.biz_id}: state {row.state}, attempt {row.attempts}"
        if error is None or isinstance(error, RetryLater):
            return HandlerFailed(f"{where}.\n{row.last_error}\n{row.traceback}".rstrip())
        error.add_note(where)
        return error


def _failed(handlers: Iterable[Handler]) -> list[InboxMessage]:
    names = {handler.using: {one.name for one in handlers if one.using == handler.using} for handler in handlers}
    states = [State.RETRYING, State.DEAD]
    return [
        row
        for alias, known in names.items()
        for row in InboxMessage.objects.using(alias).filter(handler__in=known, state__in=states).order_by("pk")
    ]


def _outcome(row: InboxMessage) -> tuple[object, ...]:
    return row.handler, row.pk, row.state, row.attempts, row.next_attempt_at
