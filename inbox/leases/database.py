"""Leases in the handler's own database: the record is the inbox row itself.

The row is stored, with its body, when the lease is acquired. So a duplicate can be acknowledged at once, and any runner takes
over the message of a dead process when its lease has ended. `lease_store` opens this store, or another that the settings name.
"""

import itertools
import random
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from django.utils.module_loading import import_string

from exactly_once.process.clock import monotonic
from inbox.conf import IN_THE_DATABASE, InboxOptions
from inbox.leases.stores import Lease, LeaseStore, T
from inbox.store import leases
from inbox.store.rows import Failure, NewRow
from inbox.transactions.handler_transaction import Arrival
from inbox.transactions.persistence import committed


class DatabaseLeases:
    """See `LeaseStore`. The clock is the database's."""

    def __init__(self, options: InboxOptions) -> None:
        self._duplicate_timeout = options.DUPLICATE_TIMEOUT

    def acquire(self, arrival: Arrival) -> Lease | None:
        began_at, alias, lasts = monotonic(), arrival.handler.using, _with_random_microseconds(arrival.terms.duration)
        tries = itertools.count()
        granted = committed(lambda: self._grant(arrival, lasts, is_retry=next(tries) > 0), alias)
        if granted is None:
            return None
        lease = Lease(
            store=self, arrival=arrival, fence=granted.fence, attempt=granted.attempt, pk=granted.row, began_at=began_at
        )
        if granted.fence > 1:
            lease.steps = committed(lambda: leases.steps_of(alias, granted.row), alias)
        return lease

    def _grant(self, arrival: Arrival, lasts: timedelta, *, is_retry: bool) -> leases.Granted | None:
        alias, stored = arrival.handler.using, arrival.stored
        if stored is not None:
            return leases.lease_stored(alias, stored, lasts, arrival.exclusive_key)
        fresh = leases.lease_fresh(alias, arrival.row, lasts, self._duplicate_timeout)
        return fresh or leases.lease_over(alias, arrival.row, lasts, is_retry=is_retry)

    def extend(self, lease: Lease, by: timedelta, *, stopping: bool = False) -> bool:
        return _committed(lease, leases.extend, by, stopping)

    def remember(self, lease: Lease, step: str, result: str | None) -> bool:
        return _committed(lease, leases.remember, step, result)

    def consume(self, lease: Lease) -> bool:
        return _committed(lease, leases.consume, lease.arrival.order)

    def free(self, lease: Lease, failure: Failure) -> bool:
        return _committed(lease, leases.free, failure, lease.arrival.leaves(failure))

    def forget(self, lease: Lease, step: str) -> None:
        _committed(lease, leases.forget_begun, step)

    def leave(self, lease: Lease) -> None:
        """Its row stays running until the lease ends."""

    def is_held(self, alias: str, row: NewRow) -> bool:
        """The row of a running message says so itself."""
        return False

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        return {}


def _with_random_microseconds(lease: timedelta) -> timedelta:
    """A duration that identifies the lease: its owner recognizes it if the answer to its request was lost."""
    return lease + timedelta(microseconds=random.randrange(1, 100_000))


def _committed(lease: Lease, write: Callable[..., T], *given: object) -> T:
    """Write as the owner of the lease, which is on a row."""
    alias = lease.arrival.handler.using
    return committed(partial(write, alias, lease.pk, lease.fence, *given), alias)


# Imported by name: its library is optional.
_REDIS = "inbox.redis_leases.store.RedisLeases"
_opened: dict[tuple[str, str, timedelta, timedelta], LeaseStore] = {}


def lease_store(options: InboxOptions) -> LeaseStore:
    """The lease store, one for all threads of this process."""
    key = (options.LEASE_STORE, options.group, options.RETENTION, options.DUPLICATE_TIMEOUT)
    if key not in _opened:
        kind: Any = DatabaseLeases if options.LEASE_STORE == IN_THE_DATABASE else import_string(_REDIS)
        _opened.setdefault(key, kind(options))
    return _opened[key]
