"""Run the project's checkers and callbacks in a relay process.

These functions may be slow, hang or fail, and must not delay messages or other functions. They run in a limited number of
threads. The process claims only as many calls as these threads can begin at once, and leaves the others to other processes.
Calls that may block for the same reason form a *group*: the checks of a topic, the calls of a callback. No group uses the last
thread.

Python cannot stop a thread. A call that runs longer than its limit is logged with its stack, and a new thread replaces its
thread. The call still counts for its group, so the number of hanging threads is limited, too.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from math import inf
from queue import SimpleQueue
from typing import Protocol

from django.db import connections, transaction

from exactly_once.conf.settings import redacted_error
from exactly_once.process import work
from exactly_once.process.clock import awake, monotonic
from exactly_once.process.logs import Reminder, escaping_logger
from exactly_once.process.loop import Bell, StopRequest
from exactly_once.process.main_thread import stack_of
from exactly_once.process.outage import Outage, OutageLog
from exactly_once.sql.connections import drop_unusable_connections
from exactly_once.sql.faults import is_collision, is_outage
from exactly_once.sql.turns import Turns
from exactly_once.wire.text import describe
from outbox.conf import OutboxOptions
from outbox.store.dialect import begin_bounded

logger = escaping_logger(__name__)

_SHORTEST_POLL_SECONDS = 0.5
LONGEST_POLL = timedelta(seconds=5)
_REPORT_SECONDS = 60.0
PAUSE = timedelta(seconds=1)
"""Delay after an outage, a deadlock or a conflict with SQLite's other writer, which are not the function's fault."""
_SHARE_OF_THE_GRACE = 0.8
"""The share of SHUTDOWN_GRACE for running calls; the remainder is for the rest of the shutdown."""


class Call(Protocol):
    """A claimed call. Its `str()` names it in the log."""

    @property
    def group(self) -> str:
        """The topic of a check, the name of a callback."""

    def run(self) -> None:
        """Call the function and store its result.

        Raises:
            django.db.Error: the database became unavailable, and no result was stored.
        """

    def extend_claim(self) -> None:
        """Extend the claim of a running call, so that no other process begins it."""

    def give_back(self) -> None:
        """End the claim of a call without a result, so that it is due again."""


@dataclass(eq=False)
class _Running:
    call: Call
    since: float = field(default_factory=awake)
    thread: int | None = None
    extended_at: float = field(default_factory=monotonic)
    reported_at: float | None = None

    @property
    def is_overdue(self) -> bool:
        return self.reported_at is not None


def call_bounded(
    alias: str,
    options: OutboxOptions,
    number: int,
    call: Callable[[], None],
    failed: Callable[[BaseException, str, timedelta], None],
) -> None:
    """Call it in a transaction, which the server ends after CALLBACK_TIMEOUT. With an error, roll back, and call `failed`.

    Args:
        number: of this attempt, counted from 1.
        failed: takes the error, also a SystemExit, what may be stored of it, and the delay before the next attempt.

    Raises:
        django.db.Error: the database became unavailable before the limit. The call has not failed.
    """
    limit, began_at = options.CALLBACK_TIMEOUT, monotonic()
    try:
        with transaction.atomic(using=alias, durable=True):
            begin_bounded(alias, limit)
            call()
    except BaseException as error:
        took = timedelta(seconds=monotonic() - began_at)
        if is_outage(error) and took < limit:
            raise
        drop_unusable_connections()
        reason = reason_of(error, options)
        if took >= limit:
            reason += f" (it took {took.total_seconds():.1f} s, and CALLBACK_TIMEOUT is {limit.total_seconds():g} s)"
        failed(error, reason, PAUSE if is_collision(error) else options.retry.delay(number))


def reason_of(error: BaseException, options: OutboxOptions) -> str:
    """What may be stored and logged of an error."""
    return redacted_error(options.REDACT_ERRORS, f"{type(error).__name__}: {describe(error)}")


class Attendant:
    """A companion of the relay that runs the calls that are due.

    Args:
        name: of its threads, and in the log.
        alias: the database of the outbox.
        claim: claims up to this many due calls, except for these groups, so that no other process takes them.
        threads: maximum number of concurrent calls, without those beyond their limit.
        limit: a call that runs longer is logged.
        longest_poll: maximum time between two claims while no call is due.
        database_log: reports outages; the loops of one process share it.
    """

    def __init__(
        self,
        name: str,
        alias: str,
        claim: Callable[[int, Collection[str]], Sequence[Call]],
        options: OutboxOptions,
        database_log: OutageLog | None,
        *,
        threads: int,
        limit: timedelta,
        longest_poll: timedelta = LONGEST_POLL,
    ) -> None:
        self._name = name
        self._alias = alias
        self._claim = claim
        self._most = threads
        self._each = max(threads - 1, 1)
        self._limit = limit.total_seconds()
        self._extend_seconds = self._limit / 4
        self._longest_poll_seconds = longest_poll.total_seconds()
        self._grace = options.SHUTDOWN_GRACE.total_seconds()
        self._changing = threading.Lock()
        self._running: list[_Running] = []
        self._interrupted: list[Call] = []
        self._outages = Reminder()
        self._threads: list[threading.Thread] = []
        self._numbers = count()
        self._bell = Bell()
        self._may_ring_at = -inf
        self._queue: SimpleQueue[_Running | None] = SimpleQueue()
        unexpected = f"Unexpected error in {name} on %r: due calls could not be claimed; they stay due."
        self._turns = Turns(name, unexpected, database=Outage("the database", log=database_log))

    def ring(self) -> None:
        """Wake the loop, because a call may be due. Rings cause no more queries than the shortest poll interval allows."""
        if (now := monotonic()) >= self._may_ring_at:
            self._may_ring_at = now + _SHORTEST_POLL_SECONDS
            self._bell.ring()

    def run(self, stop: StopRequest) -> None:
        for _ in range(self._most):
            self._start_thread()
        poll_seconds = _SHORTEST_POLL_SECONDS
        try:
            with self._reporting():
                while not stop:
                    begun = self._begin_due(stop)
                    for running in begun or ():
                        self._queue.put(running)
                    if begun or self._bell.wait(min(poll_seconds, self._extend_seconds), stop):
                        poll_seconds = _SHORTEST_POLL_SECONDS
                    else:
                        poll_seconds = min(2 * poll_seconds, self._longest_poll_seconds)
                self._end_threads()
        finally:
            connections.close_all()

    def drain(self, stop: StopRequest) -> int:
        """Run all due calls one after the other; return their number. It waits for an unavailable database."""
        done = 0
        with self._reporting():
            while not stop:
                begun = self._begin_due(stop, raising=True)
                if begun is None:
                    continue
                if not begun:
                    break
                for running in begun:
                    self._run(running)
                done += len(begun)
        return done

    def _begin_due(self, stop: StopRequest, *, raising: bool = False) -> list[_Running] | None:
        """Claim as many calls as can begin; None if that failed.

        It extends the claims of running calls first, so that they are not claimed a second time.
        """

        def begin() -> list[_Running]:
            room, full = self._room()
            self._extend_claims()
            while self._interrupted:
                self._interrupted[0].give_back()
                del self._interrupted[0]
            begun = list(map(_Running, self._claim(room, full))) if room and not stop.is_paused else []
            with self._changing:
                self._running += begun
            return begun

        return self._turns.take(self._alias, begin, stop, raising=raising)

    def _room(self) -> tuple[int, set[str]]:
        """How many calls of any group may begin, and the groups that have reached their limit."""
        with self._changing:
            free = self._most - sum(not running.is_overdue for running in self._running)
            counted = Counter(running.call.group for running in self._running)
        full = {group for group, number in counted.items() if number >= self._each}
        most_of_one = max((number for group, number in counted.items() if group not in full), default=0)
        return min(free, self._each - most_of_one), full

    def _extend_claims(self) -> None:
        now = monotonic()
        for running in list(self._running):
            if now - running.extended_at >= self._extend_seconds:
                running.extended_at = now
                running.call.extend_claim()

    def _run(self, running: _Running) -> None:
        running.thread, running.since = threading.get_ident(), awake()
        before = work.begin("outbox", self._alias, running.call.group)
        try:
            drop_unusable_connections()
            running.call.run()
        except BaseException as error:
            if is_outage(error):
                level = logging.WARNING if self._outages.is_due() else logging.DEBUG
                became = "%s: a database became unavailable during %s, which is called again: %s."
                logger.log(level, became, self._name, running.call, describe(error))
                self._interrupted.append(running.call)
            else:
                logger.exception(
                    "Unexpected error in %s: the result of %s was not stored; it is called again.", self._name, running.call
                )
        finally:
            work.end(before)
            with self._changing:
                self._running.remove(running)
            self._bell.ring()

    def _work(self) -> None:
        try:
            while (running := self._queue.get()) is not None:
                self._run(running)
                if running.is_overdue:
                    break  # another thread has replaced this one
        finally:
            connections.close_all()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self._name}-{next(self._numbers)}", daemon=True)
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        thread.start()

    def _end_threads(self) -> None:
        """Wait for running calls for most of the grace. A call that runs longer or hangs ends with the process."""
        for _ in range(self._most):
            self._queue.put(None)
        ends_at = awake() + _SHARE_OF_THE_GRACE * self._grace
        hanging = {running.thread for running in self._running if running.is_overdue}
        for thread in self._threads:
            if thread.ident not in hanging:
                thread.join(max(ends_at - awake(), 0.0))
        for running in list(self._running):
            logger.error(
                "%s: the process ends while %s is still running after %.0f s. No result is stored, and it is called again.",
                self._name,
                running.call,
                awake() - running.since,
            )

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Run a thread that logs calls beyond their limit. It uses no database, because the database may hang, too."""
        done = threading.Event()

        def report() -> None:
            while not done.wait(min(self._limit / 4, 1.0)):
                self._report_overdue(awake())

        thread = threading.Thread(target=report, name=f"{self._name}-reports", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _report_overdue(self, now: float) -> None:
        for running in list(self._running):
            if now - running.since < self._limit or now - (running.reported_at or -inf) < _REPORT_SECONDS:
                continue
            with self._changing:
                if running not in self._running:
                    continue
                if not running.is_overdue and self._threads:
                    self._start_thread()
                running.reported_at = now
            self._bell.ring()
            logger.error(
                "%s: %s has been running for %.0f s. Other calls continue, of %s up to %d at a time in this process. Set a "
                "timeout for what it waits for, and restart this process. Its stack:\n%s",
                self._name,
                running.call,
                now - running.since,
                running.call.group,
                self._each,
                stack_of(running.thread) or "(it has just returned)",
            )
