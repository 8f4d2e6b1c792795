"""Heartbeats of a process that runs handlers. They show operators which processes run, their handlers, and what each waits for.

Separate threads send them, one for each database: neither the thread that owns the broker connection nor a worker ever waits
for them. The watchdog, not the heartbeat, ends a process whose loops are silent. No guarantee depends on a heartbeat: a failure
to send one affects only what operators see.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.db import connections
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.broker import is_local
from exactly_once.operators.heartbeat_table import HeartbeatWriter, ProcessKind
from exactly_once.plurals import number
from exactly_once.process.clock import monotonic
from exactly_once.process.heartbeat import AFTER_FAILURE_SECONDS, HEARTBEAT_SECONDS, ProcessIdentity
from exactly_once.process.loop import StopRequest
from exactly_once.sql.connections import drop_unusable_connections
from inbox.conf import inbox_options
from inbox.consumer.runner import Runner
from inbox.handlers.handler import Handler
from inbox.handlers.registry import registry
from inbox.leases.heartbeat import heartbeat as lease_heartbeat
from inbox.store import statistics
from inbox.store.heartbeats import consumers, running_handlers

_SHUTDOWN_WAIT_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Activity:
    """The current activity of a process.

    Attributes:
        handlers: the handlers that it receives messages for.
        received: deliveries since its start.
        ran: stored messages that it has run since its start.
        waits_for: the unavailable resource that stops it from working; "" if there is none.
        broker_seconds: the last round trip to the broker; None without one.
    """

    handlers: Sequence[Handler]
    received: int = 0
    ran: int = 0
    waits_for: str = ""
    broker_seconds: float | None = None


def unattended(alias: str) -> list[str]:
    """The names of this project's handlers on a database that no process runs, according to the heartbeats."""
    running = running_handlers(alias)
    return sorted(handler.name for handler in registry.all() if handler.using == alias and handler.name not in running)


def what_to_start() -> str:
    """The remedy for `unattended` handlers."""
    if is_local(inbox_options().broker_url):
        return gettext("Their messages wait in the database. Start outbox_relay or inbox_consume.")
    return gettext("Their messages wait in the broker's queues. Start inbox_consume; if it runs, read its log.")


class Heartbeats:
    """The heartbeats of this process. Other threads call `activity` for their content.

    Args:
        stop: carries out the requests of operators.
    """

    def __init__(self, activity: Callable[[], Activity], stop: StopRequest | None = None) -> None:
        self._activity = activity
        self._stop = StopRequest() if stop is None else stop
        self._identity = ProcessIdentity()
        self._started_at = monotonic()
        self._end = StopRequest()

    @contextmanager
    def sending(self, aliases: Collection[str]) -> Iterator[None]:
        """Send heartbeats to these databases during the block, and mark the rows as stopped at its end."""
        # In a test's transaction, no other connection would see the row.
        outside_transactions = sorted(alias for alias in aliases if not connections[alias].in_atomic_block)
        threads = [
            threading.Thread(target=self._send_to, args=[alias, self._writer(alias)], name=f"heartbeat-{alias}", daemon=True)
            for alias in outside_transactions
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._end.set()
            end_at = monotonic() + _SHUTDOWN_WAIT_SECONDS
            # Bounded: an unresponsive database must not block the shutdown.
            for thread in threads:
                thread.join(max(end_at - monotonic(), 0))

    def _writer(self, alias: str) -> HeartbeatWriter:
        tally = statistics.tally_from_now(alias)
        return HeartbeatWriter(consumers, alias, self._identity, tally, self._stop, self._started_at)

    def _send_to(self, alias: str, writer: HeartbeatWriter) -> None:
        try:
            while not self._end:
                drop_unusable_connections()
                self._send(alias, writer)
                self._end.wait(AFTER_FAILURE_SECONDS if writer.is_failing else HEARTBEAT_SECONDS)
            activity = self._activity()
            writer.close(received=activity.received, ran=activity.ran)
        finally:
            connections.close_all()

    def _send(self, alias: str, writer: HeartbeatWriter) -> None:
        activity = self._activity()
        writer.send(
            monotonic(),
            done=activity.received + activity.ran,
            waits_for=activity.waits_for,
            facts={
                "handlers": sorted(handler.name for handler in activity.handlers if handler.using == alias),
                "received": activity.received,
                "ran": activity.ran,
            },
            broker_seconds=activity.broker_seconds,
        )


class RunnerHeartbeats:
    """The heartbeats of a relay that runs this service's handlers (local://)."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(self, stop: StopRequest) -> None:
        heartbeats = Heartbeats(lambda: Activity(handlers=registry.all(), ran=self._runner.ran), stop)
        with heartbeats.sending({handler.using for handler in registry.all()}):
            while not stop.wait(HEARTBEAT_SECONDS):
                pass
            lease_heartbeat.announce_stop()

    def drain(self, stop: StopRequest) -> int:
        """Write the statistics of the runs so far; return 0, because it makes no message ready."""
        for alias, tally in statistics.tallies.items():
            if not tally.is_empty:
                statistics.writer(alias).write()
        return 0


def _counts(row: Any) -> Sequence[str]:
    return [
        gettext("{} deliveries").format(number(row.facts["received"])),
        gettext("{} stored run").format(number(row.facts["ran"])),
    ]


def _missing(alias: str) -> str:
    names = unattended(alias)
    words = gettext("No consumer is running for: %(names)s. %(remedy)s")
    return words % {"names": ", ".join(names), "remedy": what_to_start()} if names else ""


CONSUMERS = ProcessKind(name=_("consumer"), heartbeats=consumers, counts=_counts, missing=_missing)
