"""Heartbeats of a process that runs handlers. They show operators which processes run, their handlers, and what each waits for.

Separate threads send them, one for each database: neither the thread that owns the broker connection nor a worker ever waits
for them. The watchdog, not the heartbeat, ends a process whose loops are silent. No guarantee depends on a heartbeat: a failure
to send one affects only what operators see.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import connections
from django.utils.translation import gettext

from exactly_once.broker import scheme_of
from exactly_once.operators.minutes import MinuteWriter
from exactly_once.process.clock import monotonic
from exactly_once.process.heartbeat import (
    AFTER_FAILURE_SECONDS,
    FORGET_SECONDS,
    FORGOTTEN_AFTER,
    HEARTBEAT_SECONDS,
    UNCHANGED_SECONDS,
    ProcessIdentity,
    Rate,
    milliseconds,
    one_line,
    resident_bytes,
)
from exactly_once.process.loop import StopRequest
from exactly_once.process.requests import Request
from exactly_once.sql.connections import drop_unusable_connections
from exactly_once.wire.text import describe
from inbox.conf import LOCAL_BROKER, inbox_options
from inbox.handlers.handler import Handler
from inbox.handlers.registry import registry
from inbox.leases.heartbeat import heartbeat as lease_heartbeat
from inbox.runner import Runner
from inbox.store import statistics
from inbox.store.heartbeats import consumers, running_handlers

logger = logging.getLogger(__name__)

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
    if scheme_of(inbox_options().broker_url) == scheme_of(LOCAL_BROKER):
        return gettext("Their messages wait in the database. Start `outbox_relay` or `inbox_consume`.")
    return gettext("Their messages wait in the broker's queues. Start `inbox_consume`; if it runs, read its log.")


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
            threading.Thread(
                target=self._send_to, args=[alias, statistics.writer(alias)], name=f"heartbeat-{alias}", daemon=True
            )
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

    def _send_to(self, alias: str, minutes: MinuteWriter) -> None:
        sender, rate = _Sender(alias, self._identity, self._stop), Rate(self._started_at)
        try:
            while not self._end:
                sender.send(self._state(alias, rate))
                if not sender.is_failing:
                    minutes.write_if_due()
                self._end.wait(sender.pause_seconds)
            if not sender.is_failing:
                minutes.write()
            sender.retire()
        finally:
            connections.close_all()

    def _state(self, alias: str, rate: Rate) -> dict[str, Any]:
        activity, now = self._activity(), monotonic()
        return {
            "running_for": timedelta(seconds=now - self._started_at),
            "rate": rate.of(now, activity.received + activity.ran),
            "memory_bytes": resident_bytes(),
            "broker_ms": milliseconds(activity.broker_seconds),
            "mode": self._stop.mode,
            "handlers": sorted(handler.name for handler in activity.handlers if handler.using == alias),
            "received": activity.received,
            "ran": activity.ran,
            "waits_for": one_line(activity.waits_for),
        }


class _Sender:
    """Writes the row of this process on one database, and carries out the request in it. Never raises."""

    def __init__(self, alias: str, identity: ProcessIdentity, stop: StopRequest) -> None:
        self._alias = alias
        self._identity = identity
        self._stop = stop
        self._delete_old_at = self._write_at = monotonic()
        self._database_seconds: float | None = None
        self._written = self._failing = False

    @property
    def is_failing(self) -> bool:
        """Could the last heartbeat not be written?"""
        return self._failing

    @property
    def pause_seconds(self) -> float:
        return AFTER_FAILURE_SECONDS if self._failing else HEARTBEAT_SECONDS

    def send(self, state: dict[str, Any]) -> None:
        try:
            drop_unusable_connections()
            if request := self._write(state) if monotonic() >= self._write_at else self._pending():
                self._obey(request)
            self._failing = False
        except Exception as error:  # noqa: BLE001 - no error of a heartbeat may end the process
            connections[self._alias].close()
            if not self._failing:
                logger.info(
                    "heartbeat: not written to database %r (%s). The process continues; it may be shown as silent.",
                    self._alias,
                    describe(error),
                )
            self._failing = True

    def _write(self, state: dict[str, Any]) -> Request | None:
        began_at = monotonic()
        request = consumers.write(self._alias, self._identity, database_ms=milliseconds(self._database_seconds), **state)
        now = monotonic()
        self._database_seconds = now - began_at
        self._written = True
        # On a database with one writer, each heartbeat takes the write lock.
        self._write_at = now if connections[self._alias].vendor == "postgresql" else began_at + UNCHANGED_SECONDS
        if now >= self._delete_old_at:
            self._delete_old_at = now + FORGET_SECONDS
            consumers.delete_old(self._alias, FORGOTTEN_AFTER)
        return request

    def _pending(self) -> Request | None:
        return consumers.pending(self._alias, self._identity.id)

    def _obey(self, request: Request) -> None:
        self._stop.obey(request)
        consumers.acknowledge(self._alias, self._identity.id, request, self._stop.mode)
        logger.warning("consumer: an operator requested: %s; this process is %s.", request, self._stop.mode)

    def retire(self) -> None:
        """Mark the row as stopped, unless the database is unavailable."""
        if not self._written or self._failing:
            return
        try:
            consumers.mark_stopped(self._alias, self._identity.id)
        except Exception as error:  # noqa: BLE001 - as above; another process deletes the row later
            logger.debug("heartbeat: not marked as stopped in database %r: %s", self._alias, describe(error))


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
                statistics.continued_writer(alias).write()
        return 0
