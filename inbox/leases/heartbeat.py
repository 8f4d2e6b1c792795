"""The lease heartbeat: threads that extend the leases of running handlers, one for each store and database.

An unresponsive server blocks its caller, so the leases of one database do not wait for another.

Each lease is extended after a third of its duration, so two misses cost nothing, and never beyond the limit of its handler. A
lost lease is logged and marked; its owner can settle nothing, and its next step is refused. The heartbeat retries an
unavailable store until the lease must have ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta

from django.db import connections

from inbox.leases.stores import Lease, LeaseStore
from inbox.transactions.persistence import DatabaseUnavailable
from outbox.kernel.clock import monotonic

logger = logging.getLogger(__name__)

_BEATS = 3
_ASK_AGAIN_SECONDS = 1.0


@dataclass(eq=False)
class _Beating:
    """A lease to extend."""

    store: LeaseStore
    lease: Lease
    next_at: float
    limit_at: float
    told: bool = False


class Heartbeat:
    """Extends the leases of all stores."""

    def __init__(self) -> None:
        self._of: dict[tuple[LeaseStore, str], _Pulse] = {}

    def keeping(self, store: LeaseStore, lease: Lease) -> AbstractContextManager[None]:
        """Extend `lease` as long as the block runs."""
        # A store outside the handler's database also queries that database.
        place = store, lease.wanted.handler.using
        return self._of.setdefault(place, _Pulse(lease.wanted.handler.using)).keeping(store, lease)


class _Pulse:
    """Extends the leases of one store and database. The first starts its thread."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._changed = threading.Condition()
        self._kept: set[_Beating] = set()
        self._thread: threading.Thread | None = None

    @contextmanager
    def keeping(self, store: LeaseStore, lease: Lease) -> Iterator[None]:
        terms = lease.wanted.terms
        kept = _Beating(
            store,
            lease,
            next_at=lease.began_at + terms.duration.total_seconds() / _BEATS,
            limit_at=lease.began_at + terms.limit.total_seconds(),
        )
        with self._changed:
            self._kept.add(kept)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name=f"lease-heartbeat-{self._alias}", daemon=True)
                self._thread.start()
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._kept.discard(kept)

    def _work(self) -> None:
        while True:
            due = self._wait()
            try:
                for kept in due:
                    self._beat(kept)
            except Exception:
                # The other leases must not be lost because of it.
                logger.exception("The heartbeat of leases met an error nobody foresaw.")
            finally:
                # Leases are long: the connection would be idle until the next beat.
                connections.close_all()

    def _wait(self) -> list[_Beating]:
        with self._changed:
            while True:
                now = monotonic()
                if due := [kept for kept in self._kept if kept.next_at <= now and not kept.lease.lost]:
                    return due
                waits = [kept.next_at - now for kept in self._kept if not kept.lease.lost]
                self._changed.wait(min(waits, default=None))

    def _beat(self, kept: _Beating) -> None:
        lease, now = kept.lease, monotonic()
        kept.next_at = now + _ASK_AGAIN_SECONDS
        ends_at = min(now + lease.wanted.terms.duration.total_seconds(), kept.limit_at)
        if ends_at <= lease.ends_at:
            self._let_end(kept)
            return
        try:
            extended = kept.store.extend(lease, timedelta(seconds=ends_at - now))
        except DatabaseUnavailable as outage:
            self._miss(kept, outage)
            return
        if extended:
            lease.ends_at = ends_at
            kept.next_at = now + (ends_at - now) / _BEATS
            kept.told = False
        elif not lease.settling:
            _lose(lease, "another has it, or it ended before it could be extended")

    def _let_end(self, kept: _Beating) -> None:
        lease = kept.lease
        if lease.is_over:
            _lose(lease, f"its limit of {lease.wanted.terms.limit} is reached")
            return
        kept.next_at = lease.ends_at
        if not kept.told:
            kept.told = True
            logger.warning(
                "%s has been running for so long that its lease is not extended any more; it ends in %.0f s.",
                lease,
                lease.ends_at - monotonic(),
            )

    def _miss(self, kept: _Beating, outage: DatabaseUnavailable) -> None:
        lease = kept.lease
        if lease.is_over:
            _lose(lease, f"its store was unavailable: {outage}")
            return
        kept.next_at = min(monotonic() + _ASK_AGAIN_SECONDS, lease.ends_at)
        if not kept.told:
            kept.told = True
            logger.warning(
                "%s: its lease could not be extended and ends in %.0f s (%s).", lease, lease.ends_at - monotonic(), outage
            )


def _lose(lease: Lease, why: str) -> None:
    lease.lost = True
    logger.error(
        "%s: its lease is lost, %s. What its handler does from now on is settled by nobody, and another may run the message.",
        lease,
        why,
    )


heartbeat = Heartbeat()
