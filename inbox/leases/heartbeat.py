"""The lease heartbeat: threads that extend the leases of running handlers, one for each store and database.

There are several threads because an unresponsive server blocks its caller.

Each lease is extended after a third of its duration, so two failures cost nothing, and never beyond the limit of its handler. A
lost lease is logged and marked; its owner can settle nothing, and its next step is refused. If the store is unavailable, the
extension is retried until the lease must have ended. When the process is asked to stop, each lease is extended at once, because
its row then says so: see `receiving.in_hand`.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from math import inf

from django.db import connections

from exactly_once.process.clock import monotonic
from inbox.leases.stores import EXTENSIONS_PER_LEASE, Lease, LeaseStore
from inbox.transactions.persistence import DatabaseUnavailable

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


class _ExtendingThread:
    """Extends the leases of one store and database. The first lease starts the thread."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._changed = threading.Condition()
        self._running: set[Lease] = set()
        self._thread: threading.Thread | None = None
        self._wakes_at = inf

    def announce_stop(self) -> None:
        with self._changed:
            for one in self._running:
                one.next_at, one.stopping = monotonic(), True
            self._changed.notify()

    @contextmanager
    def extending(self, lease: Lease) -> Iterator[None]:
        with self._changed:
            self._running.add(lease)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name=f"lease-heartbeat-{self._alias}", daemon=True)
                self._thread.start()
            if lease.next_at < self._wakes_at:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._running.discard(lease)

    def _work(self) -> None:
        while True:
            due = self._wait()
            try:
                for one in due:
                    self._extend(one)
            except Exception:
                # The other leases must not be lost because of it.
                logger.exception("lease heartbeat: unexpected error on the database %r; extensions continue.", self._alias)
            finally:
                # Leases are long: the connection would be idle until the next extension.
                connections.close_all()

    def _wait(self) -> list[Lease]:
        with self._changed:
            while True:
                now = monotonic()
                if due := [one for one in self._running if one.next_at <= now and not one.lost]:
                    return due
                # When it wakes up, most leases that it waited for have ended. A notification for each new one would cost more.
                self._wakes_at = min((one.next_at for one in self._running if not one.lost), default=inf)
                self._changed.wait(None if self._wakes_at == inf else self._wakes_at - now)

    def _extend(self, lease: Lease) -> None:
        now = monotonic()
        lease.next_at = now + _RETRY_SECONDS
        ends_at = min(now + lease.terms.duration.total_seconds(), lease.limit_at)
        if ends_at <= lease.ends_at:
            lease.next_at = lease.ends_at
            self._not_extended(lease, f"the limit of its Lease is {lease.terms.limit}; raise it if runs may take longer")
            return
        try:
            extended = lease.store.extend(lease, timedelta(seconds=ends_at - now), stopping=lease.stopping)
        except DatabaseUnavailable as outage:
            lease.without_store = True
            lease.next_at = min(monotonic() + _RETRY_SECONDS, lease.ends_at)
            self._not_extended(lease, f"its store is unavailable, and this is retried ({outage})")
            return
        if extended:
            lease.ends_at, lease.without_store = ends_at, False
            lease.next_at = now + (ends_at - now) / EXTENSIONS_PER_LEASE
            lease.is_reported = False
        elif not lease.settling:
            _mark_lost(lease, "another owner has it, or it ended before it could be extended")

    def _not_extended(self, lease: Lease, reason: str) -> None:
        if lease.is_over:
            _mark_lost(lease, reason)
        elif not lease.is_reported:
            lease.is_reported = True
            logger.warning("%s: its lease is not extended and ends in %.0f s: %s.", lease, lease.ends_at - monotonic(), reason)


def _mark_lost(lease: Lease, why: str) -> None:
    lease.lost = True
    logger.error("%s: its lease is lost: %s. The outcome of this run is not stored, and the message may run again.", lease, why)


_threads: dict[tuple[LeaseStore, str], _ExtendingThread] = {}


def announce_stop() -> None:
    """The process has been asked to stop. Does not wait."""
    for thread in [*_threads.values()]:
        thread.announce_stop()


def extending(lease: Lease) -> AbstractContextManager[None]:
    """Extend `lease` as long as the block runs."""
    # A store outside the handler's database also queries that database.
    alias = lease.arrival.handler.using
    key = lease.store, alias
    thread = _threads.get(key) or _threads.setdefault(key, _ExtendingThread(alias))
    return thread.extending(lease)
