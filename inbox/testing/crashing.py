"""Prove that the effect of a handler happens once, at whichever step its process dies.

For each step, a forked process receives one message as a consumer does, and kills itself at that step by SIGKILL: it runs no
`finally`, no rollback, and sends no answer to the broker. Then the test does what the broker and the next consumer do: it
delivers the message again if it was not acknowledged, and runs the stored message. The product is not patched. A handler is
observed through its call; the commit after it is the next one on its connection.

A forked process has the handlers, settings and databases of the test, including changes by fixtures.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from django.db import connections

from exactly_once.process.clock import monotonic
from exactly_once.sql.now import DatabaseTime
from exactly_once.testing.database import require_tests
from inbox.conf import IN_THE_DATABASE, inbox_options
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.states import DUE, State
from inbox.testing.deliveries import TIMEOUT_SECONDS, receive, run_due, until
from inbox.testing.messages import make_message
from inbox.testing.observing import Failures, observed, registered

_ACKNOWLEDGED = "+"
_OPEN = (*DUE, State.WAITING)


class _Step(Enum):
    INSERT = "before the inbox row is inserted"
    HANDLER = "after the insert, before the handler"
    SENTINEL = "after the handler, before the sentinel"
    COMMIT = "after the sentinel, before the commit"
    ACK = "after the commit, before the acknowledgement"
    END = "after the acknowledgement"


def assert_effect_once(
    handler: Callable[..., Any] | str, message: Message | Callable[[], Message], *, effect: Callable[[], int]
) -> None:
    """Assert that the handler's effect happens exactly once, although its process is killed.

    A process is killed at each step: before the inbox row is inserted, after that, after the handler, after the sentinel, after
    the commit, and after the acknowledgement; once in a first delivery, and once in a redelivery. A message that is stored
    first, such as that of an ordered handler, is acknowledged before the handler is called. A leased handler has no sentinel
    and no commit.

    Args:
        handler: the decorated function, or the name of the handler.
        message: each process gets a copy with its own id and biz-id; or a function that returns a new message for each, for a
            handler that takes its biz-id from the payload or whose effect can happen only once per payload.
        effect: counts the effects. It must count what another process has committed: rows or files, not variables.

    Raises:
        AssertionError: at some step the effect was lost, or happened more than once; the text lists all steps.
        LookupError: the function is not a handler of the message's topic.
        RuntimeError: the test is in a transaction, its database is in memory, its lease is in Redis, or this platform
            cannot fork; or it is not in a test.
        ValueError: two of the messages have the same biz-id.
        Exception: what the handler raises without being killed.
    """
    __tracebackhide__ = True
    require_tests("assert_effect_once")
    make = message if callable(message) else _copies(message)
    counts: dict[str, int] = {}
    biz_ids: set[str] = set()
    for redelivered in (False, True):
        for step in _Step:
            one = make()
            known = registered(handler, one.topic)
            if step is _Step.COMMIT and known.lease:
                continue
            _require_usable(known)
            _require_new(known, one, biz_ids)
            before = effect()
            _Crash(known, one, step, redelivered=redelivered).run()
            counts[f"{'redelivery' if redelivered else 'delivery'}, killed {step.value}"] = effect() - before
    if set(counts.values()) != {1}:
        steps = "\n".join(f"  {count} in a {name}{'' if count == 1 else '  <--'}" for name, count in counts.items())
        raise AssertionError(
            f"The effect of {known.name} did not happen exactly once at every step. Number of effects:\n{steps}"
        )


def _copies(message: Message) -> Callable[[], Message]:
    named = "" if message.biz_id == message.id else message.biz_id
    same = {name: getattr(message, name) for name in ("key", "headers", "created_at")}
    numbers = iter(range(1, 2 * len(_Step) + 1))

    def make() -> Message:
        number = next(numbers)
        return make_message(message.topic, message.payload, biz_id=named and f"{named}-{number}", **same)

    return make


def _require_usable(handler: Handler) -> None:
    connection: Any = connections[handler.using]
    if not hasattr(os, "fork"):
        raise RuntimeError("assert_effect_once() forks processes, which this platform cannot do. Run it on Linux or macOS.")
    if any(opened.in_atomic_block for opened in connections.all(initialized_only=True)):
        raise RuntimeError(
            "assert_effect_once() was called inside a transaction, but its processes see only committed rows. Use "
            "TransactionTestCase, or @pytest.mark.django_db(transaction=True), and call it outside atomic()."
        )
    if connection.vendor == "sqlite" and connection.is_in_memory_db():
        raise RuntimeError(
            f"assert_effect_once() needs a database that several processes can open, but {handler.using!r} is in memory: set "
            f'DATABASES[{handler.using!r}]["TEST"] = {{"NAME": BASE_DIR / "test.sqlite3"}}.'
        )
    if handler.lease and inbox_options().LEASE_STORE != IN_THE_DATABASE:
        raise RuntimeError(
            f"The lease of {handler.name} is in Redis, where a killed process holds it until it expires. Test it with "
            f"INBOX['LEASE_STORE'] = {IN_THE_DATABASE!r}."
        )


def _require_new(handler: Handler, message: Message, biz_ids: set[str]) -> None:
    biz_id = handler.identify(handler.typed(message))
    if biz_id in biz_ids:
        raise ValueError(
            f"Two messages for {handler.name} have the biz-id {biz_id!r}, so the second would be a duplicate. Pass a function "
            "that returns a new message for each process."
        )
    biz_ids.add(biz_id)


@dataclass(frozen=True)
class _Crash:
    """One process that is killed with one message, and the recovery."""

    handler: Handler
    message: Message
    step: _Step
    redelivered: bool

    def run(self) -> None:
        acknowledged = self._killed()
        failures = Failures()
        (watched,) = failures.watched([self.handler])
        with failures.raising([self.handler]):
            for _ in until(f"message {self.message.id} was handled after a process was killed {self.step.value}"):
                acknowledged = acknowledged or not receive(watched, [self.message], redelivered=True)
                self._run_stored(watched)
                if acknowledged and not self._rows().filter(state__in=_OPEN).exists():
                    return

    def _killed(self) -> bool:
        """Run a process that receives the message and is killed; was the message acknowledged?

        Raises:
            AssertionError: the process was not killed.
        """
        _close_connections()
        fork = multiprocessing.get_context("fork")
        answers, answering = fork.Pipe(duplex=False)
        child = fork.Process(target=self._run_child, args=(answering,))
        with warnings.catch_warnings():
            # Python 3.12 warns about threads, which do not exist in the child. The child runs only this thread's code.
            warnings.simplefilter("ignore", DeprecationWarning)
            child.start()
        answering.close()
        given, ends_at = [], monotonic() + TIMEOUT_SECONDS
        with suppress(EOFError):
            while answers.poll(max(0.0, ends_at - monotonic())):
                given.append(answers.recv())
            given.append(f"it was still running after {TIMEOUT_SECONDS:.0f} s")
        child.kill()
        child.join()
        error = "".join(answer for answer in given if answer != _ACKNOWLEDGED)
        if error or child.exitcode != -signal.SIGKILL:
            raise AssertionError(f"The process of {self.handler.name} was not killed {self.step.value}:\n{error}")
        return bool(given)

    def _run_child(self, answering: Any) -> None:
        """In the child: never returns."""
        try:
            self._consume(answering)
            errors = " ".join(self._rows().values_list("last_error", flat=True))
            answering.send(f"it ended before that step. {errors}")
        except BaseException:  # noqa: BLE001 - the parent reports it
            answering.send(traceback.format_exc())
        finally:
            os._exit(0)

    def _consume(self, answering: Any) -> None:
        def acknowledge() -> None:
            self._kill_at(_Step.ACK)
            answering.send(_ACKNOWLEDGED)
            self._kill_at(_Step.END)

        watched = observed(self.handler, self._around)
        self._kill_at(_Step.INSERT)
        receive(watched, [self.message], redelivered=self.redelivered, acknowledged=acknowledge)
        self._run_stored(watched)

    def _around(self, handler: Handler, messages: tuple[Message, ...], call: Callable[[], object]) -> object:
        self._kill_at(_Step.HANDLER)
        returned = call()
        self._kill_at(_Step.SENTINEL)
        if self.step is _Step.COMMIT:
            connection: Any = connections[handler.using]
            # A COMMIT that is sent with the sentinel leaves no moment in between. A wrapper of statements has it sent alone.
            connection.execute_wrappers.append(lambda execute, *given: execute(*given))
            connection.commit = _kill
        return returned

    def _kill_at(self, step: _Step) -> None:
        if self.step is step:
            _kill()

    def _rows(self) -> Any:
        return InboxMessage.objects.using(self.handler.using).filter(handler=self.handler.name, message_id=self.message.id)

    def _run_stored(self, watched: Handler) -> None:
        """Run the message if it is stored, without waiting until the killed process's claim expires."""
        self._rows().filter(state__in=DUE).update(next_attempt_at=DatabaseTime())
        run_due([watched, *(handler for handler in registry.all() if handler.name != watched.name)])


def _kill() -> None:
    # To this thread: after a signal to the process, this thread could run for a moment.
    signal.pthread_kill(threading.get_ident(), signal.SIGKILL)


def _close_connections() -> None:
    """A child process must neither use nor close the connections of its parent."""
    for connection in connections.all(initialized_only=True):
        connection.close()
        if close_pool := getattr(connection, "close_pool", None):
            close_pool()
