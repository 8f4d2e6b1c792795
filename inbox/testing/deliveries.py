"""Deliver messages to the handlers of this project as a consumer does, and run stored messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from exactly_once.process.clock import monotonic
from exactly_once.process.loop import StopRequest
from exactly_once.sql.connections import is_inside_a_transaction
from exactly_once.testing.database import require_tests
from inbox.conf import inbox_options
from inbox.consumer.answers import Acks, Delivery, Unanswered
from inbox.consumer.lanes import size_of
from inbox.consumer.reception import Answers, Reception
from inbox.consumer.runner import Runner
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.handlers.registry import registry
from inbox.local import LocalTransport
from inbox.states import Outcome
from inbox.testing.messages import as_delivered
from inbox.testing.observing import Failures, registered

TIMEOUT_SECONDS = 30.0
_POLL_SECONDS = 0.02


def deliver(*messages: Message, times: int = 1, raise_errors: bool = True) -> None:
    """Deliver messages to all handlers of their topics, then run stored messages that are due.

    A message is serialised and decoded as with a broker, and each handler gets its own copy. Several messages are one load: a
    batch handler gets them together. A message whose duplicate is being handled in another thread is delivered again until it
    is handled or stored.

    Args:
        messages: from `make_message`.
        times: how often each message is delivered. Deliveries after the first are duplicates.
        raise_errors: raise a handler's exception after all messages have been run and stored, except RetryLater.

    Raises:
        LookupError: no handler takes the topic.
        RuntimeError: it is called inside `transaction.atomic()` (that of a test case is allowed), or not in a test.
        ValueError: there is no message, `times` is less than 1, or a message has attempt > 1; the inbox counts attempts.
        inbox.testing.observing.HandlerFailed: a message was refused, or its transaction could not commit.
        Exception: what the handler raised.
    """
    __tracebackhide__ = True
    _deliver("deliver", messages, [False] * times, raise_errors=raise_errors)


def redeliver(*messages: Message, raise_errors: bool = True) -> None:
    """Deliver messages as a broker redelivers them: an earlier delivery was not acknowledged, its consumer may have died.

    A message that was handled is a duplicate. Any other is stored and its attempt counted before the handler runs.

    Args, Raises: as `deliver`.
    """
    __tracebackhide__ = True
    _deliver("redeliver", messages, [True], raise_errors=raise_errors)


def drain(*handlers: Callable[..., Any] | str, raise_errors: bool = True) -> int:
    """Run stored messages until none is due; returns the number of runs.

    These are retries, messages of ordered handlers, and messages that an operator has retried; see `travel` for retries that
    are due later. It does the same as `inbox_consume --drain` without a broker, and does not apply rate limits. Messages that
    handlers publish stay in the outbox: `outbox.testing.run_relay` relays them and also drains the inbox.

    It works in this thread and does nothing by the clock: two calls over equal data make the same commits.

    Args:
        handlers: the functions or names of handlers, each with what belongs to it, such as its `on_dead`; default: all.
        raise_errors: as for `deliver`.

    Raises:
        RuntimeError, HandlerFailed, Exception: as `deliver`.
    """
    __tracebackhide__ = True
    require_tests("drain")
    _refuse_inside_atomic("drain")
    names = ",".join(registered(handler).name for handler in handlers)
    failures, chosen = Failures(), registry.selected(names) if names else registry.all()
    with failures.raising(chosen) if raise_errors else nullcontext():
        return run_due(failures.watched(chosen))


def run_due(handlers: Sequence[Handler]) -> int:
    """Run due messages of `handlers`; returns the number of runs."""
    return runner_of(lambda: handlers).drain(StopRequest())


def runner_of(handlers: Callable[[], Sequence[Handler]]) -> Runner:
    runner = Runner(inbox_options(), handlers=handlers)
    runner.is_reproducible = True
    return runner


def receive(
    handler: Handler, messages: Iterable[Message], *, redelivered: bool, acknowledged: Callable[[], object] = lambda: None
) -> list[Message]:
    """Receive one load for one handler; returns its deferred messages, which a consumer receives again.

    Args:
        acknowledged: called when the consumer acknowledges a message, which may be before its handler has been called.

    Raises:
        RuntimeError: a message cannot be stored.
        Exception: the database is unavailable, or cannot store the messages.
    """
    acks = Acks(None, multiple=False)
    deliveries = {
        Delivery(acks, handler, as_delivered(message, redelivered=redelivered), monotonic()): message for message in messages
    }
    left: dict[Outcome, list[Message]] = {Outcome.DEFERRED: [], Outcome.UNSTORED: []}

    def answer(answers: Answers) -> None:
        for delivery, received in answers:
            if received in left:
                left[received].append(deliveries[delivery])
            else:
                acknowledged()

    try:
        Reception(inbox_options(), Runner(inbox_options()), answer).receive([*deliveries])
    except Unanswered as error:
        raise error.__cause__ or error from None
    if unstored := left[Outcome.UNSTORED]:
        raise RuntimeError(f"The inbox could not store {unstored} for {handler.name}; see the log for the reason.")
    return left[Outcome.DEFERRED]


def until(what: str) -> Iterator[None]:
    """Yield until the caller leaves the loop.

    Raises:
        AssertionError: it has not, for half a minute.
    """
    ends_at = monotonic() + TIMEOUT_SECONDS
    while monotonic() < ends_at:
        yield
        time.sleep(_POLL_SECONDS)
    raise AssertionError(f"After {TIMEOUT_SECONDS:.0f} s, the condition is still not true: {what}.")


def _deliver(name: str, messages: Sequence[Message], deliveries: Sequence[bool], *, raise_errors: bool) -> None:
    __tracebackhide__ = True
    require_tests(name)
    if not messages or not deliveries:
        raise ValueError(f"{name}() has nothing to deliver: it needs at least one message, and times must be 1 or more.")
    if later := next((message for message in messages if message.attempt > 1), None):
        raise ValueError(
            f"The message {later.id} has attempt={later.attempt}, but the inbox counts attempts. Use run_handler() to test a "
            "given attempt."
        )
    _refuse_without_handler(messages)
    _refuse_inside_atomic(name)
    failures = Failures()
    with failures.raising() if raise_errors else nullcontext():
        handlers = failures.watched()
        for redelivered in deliveries:
            for handler in handlers:
                for load in _loads(handler, messages):
                    for _ in until(f"{handler.name} ended the concurrent duplicates of {load}"):
                        if not (load := receive(handler, load, redelivered=redelivered)):
                            break
            run_due(handlers)


def _refuse_without_handler(messages: Iterable[Message]) -> None:
    for message in messages:
        if not registry.for_topic(message.topic):
            known = ", ".join(sorted({repr(topic) for handler in registry.all() for topic in handler.topics}))
            raise LookupError(
                f"No handler is registered for the topic {message.topic!r}. Topics with handlers: {known or 'none'}."
            )


def _loads(handler: Handler, messages: Iterable[Message]) -> Iterator[list[Message]]:
    """The messages of this handler's topics, as many together as a worker takes at once."""
    ours = [message for message in messages if message.topic in handler.topics]
    for start in range(0, len(ours), size_of(handler)):
        yield ours[start : start + size_of(handler)]


def _refuse_inside_atomic(name: str) -> None:
    for alias in sorted({handler.using for handler in registry.all()}):
        if is_inside_a_transaction(alias):
            raise RuntimeError(
                f"{name}() was called inside transaction.atomic() on {alias!r}. The inbox commits each message: call it "
                "after that block. The transaction of a TestCase or of pytest-django is allowed."
            )


class LocalTestTransport(LocalTransport):
    """The transport of `outbox.testing.run_relay`, which finds it by name: `local://` without waiting for rate limits.

    Args:
        alias: the database of the outbox.
        is_broker: `local://` is the broker of the project, so its refusals apply. With another broker, a handler may write to
            another database than the outbox's.
    """

    def __init__(self, alias: str, *, is_broker: bool) -> None:
        super().__init__("local://", alias=alias, exchange="")
        self._failures = Failures()
        self._runner = runner_of(self._failures.watched)
        self._is_broker = is_broker

    def run_handlers(self, stop: StopRequest) -> int:
        """Run the stored messages that are due; returns the number of runs."""
        return self._runner.drain(stop)

    def raising_errors(self) -> AbstractContextManager[None]:
        """At the end of the block, raise why the first message was not handled."""
        return self._failures.raising()

    def _elsewhere(self, handlers: Sequence[Handler]) -> Sequence[Handler]:
        return super()._elsewhere(handlers) if self._is_broker else ()
