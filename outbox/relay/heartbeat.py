"""What a relay process says of itself while it runs, so that people see which relays live and what each of them waits for.

The loop that carries messages also writes the heartbeat, so a beat proves that the loop goes round: a thread of its own would
go on telling that all is well. It costs one statement every two seconds, five while nothing changes. Writing it may fail, and
only the reader of the page notices, because no promise depends on it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from datetime import timedelta
from typing import Any

from django.db import Error, connections

from outbox import store
from outbox.database.faults import is_outage
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

logger = logging.getLogger(__name__)

_RATE_SECONDS = 10.0
"""What the rate is an average of; an idle relay's falls to 0 within it."""


class Heartbeat:
    """The heartbeat of one relay process, shared by its loops; each of them runs in a thread of its own.

    Counting is cheap and may happen anywhere. `beat` and `close` need a connection, and must stand outside transactions.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._identity = ProcessIdentity()
        self._counting = threading.Lock()
        self._published = 0
        self._passed_at: float | None = None
        self._waits: dict[threading.Thread, str] = {}
        self._started_at = monotonic()
        self._samples: deque[tuple[float, int]] = deque([(self._started_at, 0)])
        self._writing = threading.Lock()
        self._due_at = self._started_at
        self._written_at = float("-inf")
        self._written: dict[str, Any] | None = None
        self._forget_at = self._started_at
        self._failing = False
        self._ended = False

    def published(self, count: int) -> None:
        """So many more messages are confirmed and settled."""
        with self._counting:
            self._published += count

    def passed(self) -> None:
        """This loop looked and, if there was anything to do, did it."""
        with self._counting:
            self._passed_at = monotonic()

    def waits_for(self, what: str) -> None:
        """This thread's loop cannot work until `what` is there; "" when it works.

        The process counts as waiting when all of its loops do.
        """
        with self._counting:
            self._waits[threading.current_thread()] = what

    def beat(self) -> None:
        """Write the row if it is time to. Never raises, and mostly does nothing but look at the clock.

        To be called in every round, except while the database is known to be away: then it would only wait for it.
        """
        if monotonic() < self._due_at or not self._writing.acquire(blocking=False):
            return
        try:
            now = monotonic()
            if now >= self._due_at and not self._ended:
                self._due_at = now + HEARTBEAT_SECONDS
                self._beat(now)
        finally:
            self._writing.release()

    def close(self) -> None:
        """This process ends in an orderly way: remove the row. To be called when no loop beats any more."""
        with self._writing:
            self._ended = True
            if self._written is None or self._failing:
                return  # It would only wait for a database that is unavailable; the row is forgotten in time.
            try:
                store.relays.delete(self._alias, self._identity.id)
            except Error as error:
                logger.debug("The heartbeat was not removed: %s", error)
            if not connections[self._alias].in_atomic_block:  # as it is in a test
                connections[self._alias].close()

    def _beat(self, now: float) -> None:
        with self._counting:
            published, passed_at = self._published, self._passed_at
        said = {"published": published, "rate": self._rate(now, published), "waits_for": self._reason()}
        if said == self._written and now < self._written_at + UNCHANGED_SECONDS:
            return
        try:
            store.relays.write(
                self._alias,
                self._identity,
                running_for=timedelta(seconds=now - self._started_at),
                last_pass_at=None if passed_at is None else timedelta(seconds=max(now - passed_at, 0)),
                **said,
            )
            if now >= self._forget_at:
                self._forget_at = now + FORGET_SECONDS
                store.relays.delete_silent(self._alias, FORGOTTEN_AFTER)
        except Error as error:
            self._failed(error)
        else:
            self._written, self._written_at, self._failing = said, now, False

    def _reason(self) -> str:
        """What all of its loops that are alive wait for, or ""."""
        with self._counting:
            self._waits = {loop: what for loop, what in self._waits.items() if loop.is_alive()}
            waits = list(self._waits.values())
        return one_line(waits[0]) if waits and all(waits) else ""

    def _rate(self, now: float, published: int) -> float:
        self._samples.append((now, published))
        while self._samples[1][0] <= now - _RATE_SECONDS:
            self._samples.popleft()
        since, before = self._samples[0]
        return round((published - before) / max(now - since, 1.0), 1)

    def _failed(self, error: Error) -> None:
        connection = connections[self._alias]
        if is_outage(error) and not connection.in_atomic_block:
            connection.close()
        self._due_at = monotonic() + AFTER_FAILURE_SECONDS
        if not self._failing:
            logger.info("The heartbeat was not written (%s). The relay goes on; it may be shown as silent.", error)
        self._failing = True
