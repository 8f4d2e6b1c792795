"""The process that sends: a runner whose handlers are the endpoints.

It is a process of its own, so that requests to slow endpoints never occupy a thread of the consumers. The endpoints with due
messages are read again and again; a new, paused or changed one takes effect in all processes without a restart.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from math import inf

from inbox.conf import inbox_options
from inbox.consumer.heartbeat import Activity, Heartbeats
from inbox.consumer.service import run_on_threads
from inbox.handlers.handler import Handler
from inbox.runner import Runner
from inbox.transactions.persistence import DatabaseUnavailable, committed
from inbox.webhooks import endpoints
from inbox.webhooks.delivering import handler_of
from inbox.webhooks.models import Endpoint
from outbox.database.connections import leave_pools
from outbox.kernel.clock import monotonic
from outbox.kernel.loop import StopRequest, Watchdog
from outbox.kernel.reminder import Reminder

logger = logging.getLogger(__name__)

THREADS = 16
_REFRESH_SECONDS = 1.0
_FEW = 64


class EndpointHandlers:
    """The handlers of active endpoints with due messages, a few at a time, so that a claim takes no longer with many endpoints.

    A few serve as many turns of the runner as they are, for a second at most. Then those with the next names follow, so that
    the endpoints take turns, however many they are and however large the backlog of one is.
    """

    def __init__(self, aliases: Sequence[str]) -> None:
        self._few: dict[str, list[Handler]] = {alias: [] for alias in aliases}
        self._after = dict.fromkeys(aliases, "")
        self._turns, self._read_at = 0.0, -inf
        self._lock = threading.Lock()
        self._errors = Reminder()

    def all(self) -> list[Handler]:
        with self._lock:
            if self._turns <= 0 or monotonic() - self._read_at >= _REFRESH_SECONDS:
                self.refresh()
            self._turns -= 1
            return self.shown()

    def shown(self) -> list[Handler]:
        """The present ones."""
        return [handler for handlers in self._few.values() for handler in handlers]

    def refresh(self) -> None:
        """Read the next ones. While a database is unavailable, the present ones stay, and it is asked once a second."""
        self._turns, self._read_at = 0.0, monotonic()
        for alias in self._few:
            try:
                read = committed(partial(_next_due, alias, self._after[alias]), alias)
            except DatabaseUnavailable as error:
                self._turns = inf
                if self._errors.is_due():
                    logger.warning("webhooks: the endpoints on %r cannot be read; they are read again: %s", alias, error)
                continue
            except Exception:
                self._turns = inf
                if self._errors.is_due():
                    logger.exception("webhooks: unexpected error. The endpoints on %r are read again later.", alias)
                continue
            self._few[alias] = [handler_of(alias, endpoint) for endpoint in read]
            self._after[alias] = read[-1].name if len(read) == _FEW else ""
            self._turns += len(read)


def _next_due(alias: str, after: str) -> list[Endpoint]:
    endpoints.resume_due(alias)
    return endpoints.next_due(alias, after, _FEW) or (endpoints.next_due(alias, "", _FEW) if after else [])


def serve(aliases: Sequence[str], *, drain: bool = False, threads: int = THREADS, stop: StopRequest | None = None) -> None:
    """Send the messages to the endpoints on these databases until asked to stop, or with `drain` until none is due."""
    leave_pools()
    options, stop = inbox_options(), StopRequest() if stop is None else stop
    known, watchdog = EndpointHandlers(aliases), Watchdog(limit=options.WATCHDOG)
    runner = Runner(options, stop, handlers=known.all, reports_unknown=False)
    heartbeats = Heartbeats(lambda: Activity(handlers=known.shown(), ran=runner.ran), stop)
    with watchdog.watching(), heartbeats.sending(aliases):
        if not drain:
            run_on_threads(runner, threads, stop, watchdog)
        if drain or stop.is_draining:
            with watchdog.suspended():
                while runner.drain(stop):
                    pass
    logger.info("webhooks: stopped. Requests made: %d.", runner.ran)
