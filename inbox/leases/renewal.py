"""The lease heartbeat: threads that extend the leases of running handlers, one for each store and database.

There are several threads because an unresponsive server blocks its caller.

Each lease is extended after a third of its duration, so two failures cost nothing, and never beyond the limit of its handler. A
lost lease is logged and marked; its owner can settle nothing, and its next step is refused. If the store is unavailable, the
extension is retried up to the limit: a lease that has ended meanwhile is renewed if no other process has taken it over. When
the process is asked to stop, each lease is extended at once, because its row then says so: see `receiving.in_hand`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import inf

from django.db import connections

from exactly_once.process.clock import monotonic
from exactly_once.process.deadlines import Deadlines
from exactly_once.process.logs import escaping_logger
from inbox.leases.stores import EXTENSIONS_PER_LEASE, Lease, LeaseStore
from inbox.transactions.running import DatabaseUnavailable

logger = escaping_logger(__name__)

_RETRY_SECONDS = 1.0


def _extend_all(leases: list[Lease]) -> None:
    try:
        for lease in leases:
            _extend(lease)
    except Exception:
        # The other leases must not be lost because of it.
        logger.exception("lease heartbeat: unexpected error while %d leases were extended; extensions continue.", len(leases))
    finally:
        # Leases are long: the connection would be idle until the next extension.
        connections.close_all()


def _extend(lease: Lease) -> None:
    now = monotonic()
    lease.next_at = now + _RETRY_SECONDS
    ends_at = min(now + lease.terms.duration.total_seconds(), lease.limit_at)
    if ends_at <= max(lease.ends_at, now):
        reason = f"the limit of its Lease is {lease.terms.limit}; raise it if runs may take longer"
        if not lease.is_over:
            lease.next_at = lease.ends_at
            _not_extended(lease, reason)
        elif not lease.settling:
            _mark_lost(lease, "its store was unavailable until the limit of its Lease" if lease.without_store else reason)
        return
    try:
        extended = lease.store.extend(lease, timedelta(seconds=ends_at - now), stopping=lease.stopping)
    except DatabaseUnavailable as outage:
        lease.without_store = True
        _not_extended(lease, f"its store is unavailable, and this is retried ({outage})")
        return
    if extended:
        lease.ends_at, lease.without_store = ends_at, False
        lease.next_at = now + (ends_at - now) / EXTENSIONS_PER_LEASE
        lease.is_reported = False
    elif not lease.settling:
        _mark_lost(lease, "another owner has it, or it ended before it could be extended")


def _not_extended(lease: Lease, reason: str) -> None:
    if not lease.is_reported:
        lease.is_reported = True
        left = lease.ends_at - monotonic()
        logger.warning(
            "%s: its lease is not extended and %s: %s.", lease, f"ends in {left:.0f} s" if left > 0 else "has ended", reason
        )


def _mark_lost(lease: Lease, why: str) -> None:
    lease.lost = True
    logger.error("%s: its lease is lost: %s. The outcome of this run is not stored, and the message may run again.", lease, why)


def _due_at(lease: Lease) -> float:
    return inf if lease.lost else lease.next_at


_threads: dict[tuple[LeaseStore, str], Deadlines[Lease]] = {}


def announce_stop() -> None:
    """The process has been asked to stop. Does not wait."""

    def announce(lease: Lease) -> None:
        lease.next_at, lease.stopping = monotonic(), True

    for thread in [*_threads.values()]:
        thread.hasten(announce)


@contextmanager
def extending(lease: Lease) -> Iterator[None]:
    """Extend `lease` as long as the block runs."""
    # A store outside the handler's database also queries that database.
    alias = lease.arrival.handler.using
    key = lease.store, alias
    thread = _threads.get(key) or _threads.setdefault(key, Deadlines(f"lease-heartbeat-{alias}", _due_at, _extend_all))
    thread.add(lease)
    try:
        yield
    finally:
        thread.remove(lease)
