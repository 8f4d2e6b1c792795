"""The heartbeat of a relay process. It shows operators which relays are alive and what each of them waits for.

The loop that relays messages also writes the heartbeat, so a heartbeat proves that the loop runs; a separate thread would
continue to report success. It costs one statement every two seconds. While nothing changes, this is a read of the operator's
request, and only every five seconds a write. A failed write affects only the display, because no guarantee depends on it.
"""

import threading

from django.db import connections

from exactly_once.process.clock import monotonic
from exactly_once.process.loop import StopRequest
from exactly_once.telemetry.statistics import Tally
from exactly_once.upkeep.heartbeat_table import (
    AFTER_FAILURE_SECONDS,
    HEARTBEAT_SECONDS,
    HeartbeatTable,
    HeartbeatWriter,
    ProcessIdentity,
)

relays = HeartbeatTable("outbox")


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
        self.tally = Tally()
        self._counting = threading.Lock()
        self._published = 0
        self._passed_at: float | None = None
        self._waits: dict[threading.Thread, tuple[str, bool]] = {}
        self._shards: dict[threading.Thread, int] = {}
        self._broker_seconds: float | None = None
        self._writing = threading.Lock()
        self._due_at = monotonic()
        self._writer = HeartbeatWriter(
            relays,
            alias,
            ProcessIdentity(),
            self.tally,
            StopRequest() if stop is None else stop,
            self._due_at,
        )
        self._ended = False

    def published(self, count: int) -> None:
        """Count `count` more messages as confirmed and settled."""
        with self._counting:
            self._published += count

    def passed(self, *, shards: int = 0, broker_seconds: float | None = None) -> None:
        """Record that this loop has completed a pass, with or without messages, and waits for nothing.

        Args:
            shards: how many it tries to claim in one pass.
            broker_seconds: of the last round trip to the broker; None if it is unknown.
        """
        self.waits_for("")
        with self._counting:
            self._passed_at, self._broker_seconds = monotonic(), broker_seconds
            self._shards[threading.current_thread()] = shards

    def waits_for(self, what: str, *, is_broker: bool = False) -> None:
        """Record that this thread's loop waits for `what`, for people; "" while it works.

        The process is shown as waiting if all of its loops wait.
        """
        with self._counting:
            self._waits[threading.current_thread()] = what, is_broker

    def beat(self) -> None:
        """Write the row if it is due. It never raises, and usually only reads the clock.

        Call it in every iteration, except while the database is known to be unavailable: the call would only wait for it.
        """
        if monotonic() < self._due_at or not self._writing.acquire(blocking=False):
            return
        try:
            now = monotonic()
            if now >= self._due_at and not self._ended:
                self._beat(now)
                self._due_at = monotonic() + AFTER_FAILURE_SECONDS if self._writer.is_failing else now + HEARTBEAT_SECONDS
        finally:
            self._writing.release()

    def close(self) -> None:
        """Mark the row as stopped at an orderly end of the process. Call it after all loops have ended."""
        with self._writing:
            self._ended = True
            self._writer.close(published=self._published)
            if not connections[self._alias].in_atomic_block:  # as in a test
                connections[self._alias].close()

    def _beat(self, now: float) -> None:
        with self._counting:
            published, passed_at = self._published, self._passed_at
            shards = sum(shards for loop, shards in self._shards.items() if loop.is_alive())
            self._waits = {loop: what for loop, what in self._waits.items() if loop.is_alive()}
            waits = list(self._waits.values())
        waits_for, without_broker = waits[0] if waits and all(what for what, _ in waits) else ("", False)
        self._writer.send(
            now,
            done=published,
            waits_for=waits_for,
            without_broker=without_broker,
            facts={"published": published, "shards": shards},
            broker_seconds=self._broker_seconds,
            passed_at=passed_at,
        )
