"""The heartbeat of a relay process. It shows operators which relays are alive and what each of them waits for.

The loop that relays messages also writes the heartbeat, so a heartbeat proves that the loop runs; a separate thread would
continue to report success. It costs one statement every two seconds. While nothing changes, this is a read of the operator's
request, and only every five seconds a write. A failed write affects only the display, because no guarantee depends on it.
"""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import Any

from django.db import Error, connections

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
from exactly_once.sql.faults import is_outage
from exactly_once.telemetry.statistics import Tally
from outbox.store import heartbeats, statistics

logger = logging.getLogger(__name__)


class Heartbeat:
    """The heartbeat of one relay process, shared by its loops; each loop runs in its own thread.

    Counting is cheap and may happen anywhere. `beat` and `close` need a connection; call them outside transactions.

    Args:
        stop: carries out the requests of operators.

    Attributes:
        tally: the statistics of this process, which `beat` writes once a minute.
    """

    def __init__(self, alias: str, stop: StopRequest | None = None) -> None:
        self._alias = alias
        self._stop = StopRequest() if stop is None else stop
        self._identity = ProcessIdentity()
        self.tally = Tally()
        self._statistics = statistics.writer(alias, self.tally)
        self._counting = threading.Lock()
        self._published = 0
        self._passed_at: float | None = None
        self._waits: dict[threading.Thread, str] = {}
        self._shards: dict[threading.Thread, int] = {}
        self._broker_seconds: float | None = None
        self._database_seconds: float | None = None
        self._started_at = monotonic()
        self._rate = Rate(self._started_at)
        self._writing = threading.Lock()
        self._due_at = self._started_at
        self._written_at = float("-inf")
        self._written: dict[str, Any] | None = None
        self._forget_at = self._started_at
        self._failing = False
        self._ended = False

    def published(self, count: int) -> None:
        """Count `count` more messages as confirmed and settled."""
        with self._counting:
            self._published += count

    def passed(self) -> None:
        """Record that this loop has completed a pass, with or without messages."""
        with self._counting:
            self._passed_at = monotonic()

    def waits_for(self, what: str) -> None:
        """Record that this thread's loop waits for `what`; "" while it works.

        The process is shown as waiting if all of its loops wait.
        """
        with self._counting:
            self._waits[threading.current_thread()] = what

    def claims(self, shards: int) -> None:
        """Record how many shards this loop tries to claim in one pass."""
        with self._counting:
            self._shards[threading.current_thread()] = shards

    def broker_took(self, seconds: float | None) -> None:
        """Record the last round trip to the broker; None if it is unknown."""
        self._broker_seconds = seconds

    def beat(self) -> None:
        """Write the row if it is due. It never raises, and usually only reads the clock.

        Call it in every iteration, except while the database is known to be unavailable: the call would only wait for it.
        """
        if monotonic() < self._due_at or not self._writing.acquire(blocking=False):
            return
        try:
            now = monotonic()
            if now >= self._due_at and not self._ended:
                self._due_at = now + HEARTBEAT_SECONDS
                self._beat(now)
                if not self._failing:
                    self._statistics.write_if_due()
        finally:
            self._writing.release()

    def close(self) -> None:
        """Mark the row as stopped at an orderly end of the process. Call it after all loops have ended."""
        with self._writing:
            self._ended = True
            if self._written is None or self._failing:
                return  # It would only wait for an unavailable database; silent rows are deleted later.
            self._statistics.write()
            try:
                heartbeats.relays.mark_stopped(self._alias, self._identity.id)
            except Error as error:
                logger.debug("The heartbeat was not marked as stopped: %s", error)
            if not connections[self._alias].in_atomic_block:  # as in a test
                connections[self._alias].close()

    def _beat(self, now: float) -> None:
        with self._counting:
            published, passed_at = self._published, self._passed_at
        columns = {
            "published": published,
            "rate": self._rate.of(now, published),
            "waits_for": self._reason(),
            "mode": self._stop.mode,
            "shards": self._claimed(),
        }
        try:
            if columns == self._written and now < self._written_at + UNCHANGED_SECONDS:
                request = heartbeats.relays.pending(self._alias, self._identity.id)
            else:
                request = self._write(now, passed_at, columns)
            if request:
                self._obey(request)
        except Error as error:
            self._failed(error)

    def _write(self, now: float, passed_at: float | None, columns: dict[str, Any]) -> Request | None:
        began_at = monotonic()
        request = heartbeats.relays.write(
            self._alias,
            self._identity,
            running_for=timedelta(seconds=now - self._started_at),
            last_pass_at=None if passed_at is None else timedelta(seconds=max(now - passed_at, 0)),
            memory_bytes=resident_bytes(),
            database_ms=milliseconds(self._database_seconds),
            broker_ms=milliseconds(self._broker_seconds),
            **columns,
        )
        self._database_seconds = monotonic() - began_at
        if now >= self._forget_at:
            self._forget_at = now + FORGET_SECONDS
            heartbeats.relays.delete_old(self._alias, FORGOTTEN_AFTER)
        self._written, self._written_at, self._failing = columns, now, False
        return request

    def _obey(self, request: Request) -> None:
        self._stop.obey(request)
        heartbeats.relays.acknowledge(self._alias, self._identity.id, request, self._stop.mode)
        logger.warning("relay: an operator requested: %s; this process is %s.", request, self._stop.mode)

    def _claimed(self) -> int:
        with self._counting:
            return sum(shards for loop, shards in self._shards.items() if loop.is_alive())

    def _reason(self) -> str:
        """What the process waits for, if all of its running loops wait; else ""."""
        with self._counting:
            self._waits = {loop: what for loop, what in self._waits.items() if loop.is_alive()}
            waits = list(self._waits.values())
        return one_line(waits[0]) if waits and all(waits) else ""

    def _failed(self, error: Error) -> None:
        connection = connections[self._alias]
        if is_outage(error) and not connection.in_atomic_block:
            connection.close()
        self._due_at = monotonic() + AFTER_FAILURE_SECONDS
        if not self._failing:
            logger.info("The heartbeat was not written (%s). The relay continues; it may be shown as silent.", error)
        self._failing = True
