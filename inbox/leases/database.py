"""Leases in the handler's own database: the record is the inbox row itself.

The row is stored, with its body, when the lease is acquired. So a duplicate can be acknowledged at once, and any runner takes
over the message of a dead process when its lease has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial

from exactly_once.process.clock import monotonic
from inbox.conf import InboxOptions
from inbox.leases.stores import Consumed, Held, Lease, LeaseRequest, RowDecides, Verdict
from inbox.models import SETTLED, State
from inbox.store import leases
from inbox.store import steps as steps_table
from inbox.store.rows import Failure, NewRow
from inbox.transactions.persistence import committed


class DatabaseLeases:
    """See `LeaseStore`. The clock is the database's."""

    def __init__(self, options: InboxOptions) -> None:
        """The options are not needed: each handler names its database."""

    def acquire(self, request: LeaseRequest, *, duplicate_timeout: timedelta) -> Verdict:
        began_at, alias = monotonic(), request.handler.using
        granted = committed(partial(_grant, request, duplicate_timeout), alias)
        if granted is None:
            return _verdict(request)
        lease = Lease(request=request, fence=granted.fence, attempt=granted.attempt, pk=granted.row, began_at=began_at)
        if granted.fence > 1:
            lease.steps = committed(lambda: steps_table.steps_of(alias, granted.row), alias)
        return lease

    def extend(self, lease: Lease, by: timedelta, *, stopping: bool = False) -> bool:
        alias, pk = _row_of(lease)
        return committed(lambda: leases.extend(alias, pk, lease.fence, by, stopping=stopping), alias)

    def remember(self, lease: Lease, step: str, result: str | None) -> bool:
        alias, pk = _row_of(lease)
        return committed(lambda: steps_table.remember(alias, pk, lease.fence, step, result), alias)

    def consume(self, lease: Lease) -> bool:
        alias, pk = _row_of(lease)
        return committed(lambda: leases.consume(alias, pk, lease.fence, lease.request.order), alias)

    def free(self, lease: Lease, failure: Failure) -> bool:
        alias, pk = _row_of(lease)
        return committed(lambda: leases.free(alias, pk, lease.fence, failure, lease.request.leaves(failure)), alias)

    def forget(self, lease: Lease, step: str) -> None:
        alias, pk = _row_of(lease)
        committed(lambda: steps_table.forget_begun(alias, pk, lease.fence, step), alias)

    def is_held(self, alias: str, row: NewRow) -> bool:
        standing = committed(lambda: leases.standing(alias, row), alias)
        return standing is not None and standing.state == State.RUNNING and standing.remaining > timedelta()

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        return {}


def _grant(request: LeaseRequest, duplicate_timeout: timedelta) -> leases.Granted | None:
    alias, stored, duration = request.handler.using, request.stored, request.terms.duration
    if stored is not None:
        return leases.lease_stored(alias, stored, duration, request.exclusive_key)
    fresh = leases.lease_fresh(alias, request.row, duration, duplicate_timeout)
    return fresh or leases.lease_over(alias, request.row, duration)


def _verdict(request: LeaseRequest) -> Verdict:
    if request.stored is not None:
        return RowDecides()
    standing = committed(lambda: leases.standing(request.handler.using, request.row), request.handler.using)
    if standing is None:
        return RowDecides()
    if standing.state in SETTLED:
        return Consumed()
    return Held(standing.remaining) if standing.state == State.RUNNING else RowDecides()


def _row_of(lease: Lease) -> tuple[str, int]:
    assert lease.pk is not None  # noqa: S101 - every lease of this store is on a row
    return lease.request.handler.using, lease.pk
