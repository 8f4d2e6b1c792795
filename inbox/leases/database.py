"""Leases in the handler's own database: the record is the inbox row itself.

The row is stored, with its body, when the lease is taken. So a duplicate that finds it can be acknowledged at once, and any
runner takes over the message of a dead process when its lease has ended.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from datetime import timedelta

from inbox.conf import InboxOptions
from inbox.leases.stores import Consumed, Held, Kept, Lease, Verdict, Wanted
from inbox.models import SETTLED, State
from inbox.store import leases
from inbox.store import steps as steps_table
from inbox.store.rows import Failure, NewRow
from inbox.transactions.persistence import committed
from outbox.kernel.clock import monotonic


class DatabaseLeases:
    """See `LeaseStore`. The clock is the database's."""

    def __init__(self, options: InboxOptions) -> None:
        """Nothing to open: the handler names the database."""

    def acquire(self, wanted: Wanted, *, duplicate_timeout: timedelta) -> Verdict:
        began_at, alias, lasts = monotonic(), wanted.handler.using, _unlike_others(wanted.terms.duration)
        tries = itertools.count()
        granted = committed(lambda: _grant(wanted, lasts, duplicate_timeout, asked_before=next(tries) > 0), alias)
        if granted is None:
            return _verdict(wanted)
        lease = Lease(wanted=wanted, fence=granted.fence, attempt=granted.attempt, pk=granted.row, began_at=began_at)
        if granted.fence > 1:
            lease.steps = committed(lambda: steps_table.steps_of(alias, granted.row), alias)
        return lease

    def extend(self, lease: Lease, by: timedelta) -> bool:
        alias, pk = _row_of(lease)
        return committed(lambda: leases.extend(alias, pk, lease.fence, by), alias)

    def remember(self, lease: Lease, step: str, result: str | None) -> bool:
        alias, pk = _row_of(lease)
        return committed(lambda: steps_table.remember(alias, pk, lease.fence, step, result), alias)

    def consume(self, lease: Lease) -> bool:
        alias, pk = _row_of(lease)
        return committed(lambda: leases.consume(alias, pk, lease.fence, lease.wanted.order), alias)

    def free(self, lease: Lease, failure: Failure) -> bool:
        alias, pk = _row_of(lease)
        return committed(lambda: leases.free(alias, pk, lease.fence, failure, lease.wanted.leaves(failure)), alias)

    def forget(self, lease: Lease, step: str) -> None:
        alias, pk = _row_of(lease)
        committed(lambda: steps_table.forget_begun(alias, pk, lease.fence, step), alias)

    def is_held(self, alias: str, row: NewRow) -> bool:
        standing = committed(lambda: leases.standing(alias, row), alias)
        return standing is not None and standing.state == State.RUNNING and standing.remaining > timedelta()

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        return {}


def _unlike_others(lease: timedelta) -> timedelta:
    """Slightly longer, by a random time. An owner that lost the answer recognizes its lease by it."""
    return lease + timedelta(microseconds=random.randrange(1, 100_000))


def _grant(wanted: Wanted, lasts: timedelta, duplicate_timeout: timedelta, *, asked_before: bool) -> leases.Granted | None:
    handler, stored = wanted.handler, wanted.stored
    if stored is not None:
        return leases.lease_stored(handler.using, stored.pk, stored.attempts, lasts, wanted.alone_in, was=stored.state)
    fresh = leases.lease_fresh(handler.using, wanted.row, lasts, duplicate_timeout)
    return fresh or leases.lease_over(handler.using, wanted.row, lasts, asked_before=asked_before)


def _verdict(wanted: Wanted) -> Verdict:
    if wanted.stored is not None:
        return Kept()
    standing = committed(lambda: leases.standing(wanted.handler.using, wanted.row), wanted.handler.using)
    if standing is None:
        return Kept()
    if standing.state in SETTLED:
        return Consumed()
    return Held(standing.remaining) if standing.state == State.RUNNING else Kept()


def _row_of(lease: Lease) -> tuple[str, int]:
    assert lease.pk is not None  # noqa: S101 - every lease of this store is on a row
    return lease.wanted.handler.using, lease.pk
