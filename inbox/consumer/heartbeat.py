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

from inbox.conf import LOCAL_BROKER, inbox_options
from inbox.handlers.handler import Handler
from inbox.handlers.registry import registry
from inbox.runner import Runner
from inbox.store import statistics
from inbox.store.heartbeats import consumers
from outbox.database.connections import drop_unusable_connections
from outbox.database.minutes import MinuteWriter
from outbox.kernel.broker import scheme_of
from outbox.kernel.clock import monotonic
from outbox.kernel.heartbeat import (
    AFTER_FAILURE_SECONDS,
    FORGET_SECONDS,
    FORGOTTEN_AFTER,
    HEARTBEAT_SECONDS,
    UNCHANGED_SECONDS,
    ProcessIdentity,
    one_line,
)
from outbox.kernel.loop import StopRequest
from outbox.kernel.text import describe

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
    """

    handlers: Sequence[Handler]
    received: int = 0
    ran: int = 0
    waits_for: str = ""


def unattended(alias: str) -> list[str]:
    """The names of this project's handlers on a database that no process runs, according to the heartbeats."""
    running = consumers.rows(alias).filter(silent=False).values_list("handlers", flat=True)
    attended = {name for names in running for name in names}
    return sorted(handler.name for handler in registry.all() if handler.using == alias and handler.name not in attended)


def what_to_start() -> str:
    """The remedy for `unattended` handlers."""
    if scheme_of(inbox_options().broker_url) == scheme_of(LOCAL_BROKER):
        return "Their messages wait in the database. Start `outbox_relay` or `inbox_consume`."
    return "Their messages wait in the broker's queues. Start `inbox_consume`; if it runs, read its log."


class Heartbeats:
    """The heartbeats of this process. Other threads call `activity` for their content."""

    def __init__(self, activity: Callable[[], Activity]) -> None:
        self._activity = activity
        self._identity = ProcessIdentity()
        self._started_at = monotonic()
        self._end = StopRequest()

    @contextmanager
    def sending(self, aliases: Collection[str]) -> Iterator[None]:
        """Send heartbeats to these databases during the block, and delete the rows at its end."""
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
        sender = _Sender(alias, self._identity)
        try:
            while not self._end:
                sender.send(self._state(alias))
                if not sender.is_failing:
                    minutes.write_if_due()
                self._end.wait(sender.pause_seconds)
            if not sender.is_failing:
                minutes.write()
            sender.retire()
        finally:
            connections.close_all()

    def _state(self, alias: str) -> dict[str, Any]:
        activity = self._activity()
        return {
            "running_for": timedelta(seconds=monotonic() - self._started_at),
            "handlers": sorted(handler.name for handler in activity.handlers if handler.using == alias),
            "received": activity.received,
            "ran": activity.ran,
            "waits_for": one_line(activity.waits_for),
        }


class _Sender:
    """Writes the row of this process on one database. Never raises."""

    def __init__(self, alias: str, identity: ProcessIdentity) -> None:
        self._alias = alias
        self._identity = identity
        self._delete_silent_at = monotonic()
        self._written = self._failing = False

    @property
    def is_failing(self) -> bool:
        """Could the last heartbeat not be written?"""
        return self._failing

    @property
    def pause_seconds(self) -> float:
        if self._failing:
            return AFTER_FAILURE_SECONDS
        # On a database with one writer, each heartbeat takes the write lock.
        return HEARTBEAT_SECONDS if connections[self._alias].vendor == "postgresql" else UNCHANGED_SECONDS

    def send(self, state: dict[str, Any]) -> None:
        try:
            drop_unusable_connections()
            consumers.write(self._alias, self._identity, **state)
            if monotonic() >= self._delete_silent_at:
                self._delete_silent_at = monotonic() + FORGET_SECONDS
                consumers.delete_silent(self._alias, FORGOTTEN_AFTER)
            self._written, self._failing = True, False
        except Exception as error:  # noqa: BLE001 - no error of a heartbeat may end the process
            connections[self._alias].close()
            if not self._failing:
                logger.info(
                    "heartbeat: not written to database %r (%s). The process continues; it may be shown as silent.",
                    self._alias,
                    describe(error),
                )
            self._failing = True

    def retire(self) -> None:
        """Delete the row, unless the database is unavailable."""
        if not self._written or self._failing:
            return
        try:
            consumers.delete(self._alias, self._identity.id)
        except Exception as error:  # noqa: BLE001 - as above; another process deletes the row later
            logger.debug("heartbeat: not deleted from database %r: %s", self._alias, describe(error))


class RunnerHeartbeats:
    """The heartbeats of a relay that runs this service's handlers (local://)."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(self, stop: StopRequest) -> None:
        heartbeats = Heartbeats(lambda: Activity(handlers=registry.all(), ran=self._runner.ran))
        with heartbeats.sending({handler.using for handler in registry.all()}):
            while not stop.wait(HEARTBEAT_SECONDS):
                pass

    def drain(self, stop: StopRequest) -> int:
        """Write the statistics of what was run before; return 0, because it makes no message ready."""
        for alias, tally in statistics.tallies.items():
            if not tally.is_empty:
                statistics.continued_writer(alias).write()
        return 0
