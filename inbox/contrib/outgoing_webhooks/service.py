"""The process that sends: a runner whose handlers are the endpoints.

It is a process of its own, so that requests to slow endpoints never occupy a thread of the consumers. The endpoints with due
messages are read again and again; a new, paused or changed one takes effect in all processes without a restart.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import Reminder, escaping_logger
from exactly_once.process.loop import StopRequest, Watchdog
from exactly_once.sql.connections import leave_pools
from inbox.conf import inbox_options
from inbox.consumer.heartbeat import Heartbeats, activity_of
from inbox.consumer.runner import Runner
from inbox.consumer.service import run_on_threads
from inbox.contrib.outgoing_webhooks.delivering import handler_of
from inbox.contrib.outgoing_webhooks.endpoints import next_due, resume_due
from inbox.contrib.outgoing_webhooks.models import Endpoint
from inbox.handlers.handler import Handler
from inbox.transactions.running import DatabaseUnavailable, committed

logger = escaping_logger(__name__)

THREADS = 16
_REFRESH_SECONDS = 1.0
_FEW = 64


class EndpointHandlers:
    """The handlers of active endpoints with due messages, a few at a time, so that a claim takes no longer with many endpoints.

    A few serve as many turns of the runner as they are, for a second at most. Then those with the next names follow, so that
    the endpoints take turns, however many they are and however large the backlog of one is.
    """

    def __init__(self, aliases: Sequence[str]) -> None:
        self._windows = [_Window(alias) for alias in aliases]

    def all(self) -> list[Handler]:
        for window in self._windows:
            window.take_turn()
        return self.shown()

    def shown(self) -> list[Handler]:
        """The present ones."""
        return [handler for window in self._windows for handler in window.handlers]

    def refresh(self) -> None:
        """Read the next ones. While a database is unavailable, the present ones stay, and it is asked once a second."""
        for window in self._windows:
            window.move()


class _Window:
    """The present few of one database."""

    def __init__(self, alias: str) -> None:
        self.handlers: list[Handler] = []
        self._alias = alias
        self._after = ""
        self._turns, self._read_at = 0.0, -inf
        self._reading = threading.Lock()
        self._errors = Reminder()

    def take_turn(self) -> None:
        is_over = self._turns <= 0 or monotonic() - self._read_at >= _REFRESH_SECONDS
        # One thread reads: a database that hangs must not stop the endpoints of the others.
        if is_over and self._reading.acquire(blocking=False):
            try:
                self._read()
            finally:
                self._reading.release()
        self._turns -= 1

    def move(self) -> None:
        with self._reading:
            self._read()

    def _read(self) -> None:
        self._turns, self._read_at = inf, monotonic()
        try:
            endpoints = committed(self._alias, self._next_due)
        except DatabaseUnavailable as error:
            if self._errors.is_due():
                logger.warning("webhooks: the endpoints on %r cannot be read; they are read again: %s", self._alias, error)
            return
        except Exception:
            if self._errors.is_due():
                logger.exception("webhooks: unexpected error. The endpoints on %r are read again later.", self._alias)
            return
        self.handlers = [handler_of(self._alias, endpoint) for endpoint in endpoints]
        self._after = endpoints[-1].name if len(endpoints) == _FEW else ""
        self._turns = len(endpoints)

    def _next_due(self, alias: str) -> list[Endpoint]:
        resume_due(alias)
        return next_due(alias, self._after, _FEW) or (next_due(alias, "", _FEW) if self._after else [])


def serve(aliases: Sequence[str], *, drain: bool = False, threads: int = THREADS, stop: StopRequest | None = None) -> None:
    """Send the messages to the endpoints on these databases until asked to stop, or with `drain` until none is due."""
    leave_pools()
    options, stop = replace(inbox_options(), CONCURRENCY=threads), StopRequest() if stop is None else stop
    known, watchdog = EndpointHandlers(aliases), Watchdog(limit=options.WATCHDOG)
    runner = Runner(options, stop, handlers=known.all, reports_unknown=False)
    heartbeats = Heartbeats(lambda: activity_of(runner, known.shown()), stop)
    with watchdog.watching(), heartbeats.sending(aliases):
        if not drain:
            run_on_threads(runner, threads, stop, watchdog)
        if drain or stop.is_draining:
            with watchdog.suspended():
                _drain(runner, known, stop)
    logger.info("webhooks: stopped. Requests made: %d.", runner.ran)


def _drain(runner: Runner, known: EndpointHandlers, stop: StopRequest) -> None:
    """Other processes may have sent the messages of the present endpoints; so read on until no other endpoint is found."""
    tried: set[tuple[str, str]] = set()
    while not stop:
        if runner.drain(stop):
            tried.clear()
        known.refresh()
        due = {(handler.using, handler.name) for handler in known.shown()}
        if due <= tried:
            return
        tried |= due
