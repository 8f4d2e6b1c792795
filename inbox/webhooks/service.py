"""The process that sends: a runner whose handlers are the endpoints.

It is a process of its own, so that requests to slow endpoints never occupy a thread of the consumers. The endpoints are read
once a second; a new, paused or changed one takes effect in all processes without a restart.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from django.db import connections

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
from outbox.kernel.loop import StopRequest, Watchdog

logger = logging.getLogger(__name__)

THREADS = 16
_REFRESH_SECONDS = 1.0


class EndpointHandlers:
    """The handlers of the active endpoints, as they were read last."""

    def __init__(self, aliases: Sequence[str]) -> None:
        self._by_alias: dict[str, list[Handler]] = {alias: [] for alias in aliases}

    def all(self) -> list[Handler]:
        return [handler for handlers in self._by_alias.values() for handler in handlers]

    def refresh(self) -> None:
        """Read them. While a database is unavailable, its endpoints stay as they are; the runner reports the outage."""
        for alias in self._by_alias:
            try:
                read = committed(partial(_active, alias), alias)
            except DatabaseUnavailable:
                continue
            self._by_alias[alias] = [handler_of(alias, endpoint) for endpoint in read]

    @contextmanager
    def refreshing(self) -> Iterator[None]:
        """Read them once, and then again and again during the block."""
        self.refresh()
        ended = threading.Event()
        thread = threading.Thread(target=self._refresh_until, args=[ended], name="endpoints", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(_REFRESH_SECONDS)

    def _refresh_until(self, ended: threading.Event) -> None:
        try:
            while not ended.wait(_REFRESH_SECONDS):
                try:
                    self.refresh()
                except Exception:
                    logger.exception("webhooks: the endpoints cannot be read. They stay as they were read before.")
        finally:
            connections.close_all()


def _active(alias: str) -> list[Endpoint]:
    endpoints.resume_due(alias)
    return endpoints.active(alias)


def serve(aliases: Sequence[str], *, drain: bool = False, threads: int = THREADS, stop: StopRequest | None = None) -> None:
    """Send the messages to the endpoints on these databases until asked to stop, or with `drain` until none is due."""
    leave_pools()
    options, stop = inbox_options(), StopRequest() if stop is None else stop
    known, watchdog = EndpointHandlers(aliases), Watchdog(limit=options.WATCHDOG)
    runner = Runner(options, stop, handlers=known.all, reports_unknown=False)
    heartbeats = Heartbeats(lambda: Activity(handlers=known.all(), ran=runner.ran), stop)
    with watchdog.watching(), known.refreshing(), heartbeats.sending(aliases):
        if not drain:
            run_on_threads(runner, threads, stop, watchdog)
        if drain or stop.is_draining:
            with watchdog.suspended():
                while runner.drain(stop):
                    pass
    logger.info("webhooks: stopped. Requests made: %d.", runner.ran)
