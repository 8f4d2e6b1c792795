"""Leases, and the guarantees of every lease store.

A lease is the right to run one message until an instant, by the store's clock. Each has a *fencing token*, greater than that
of any earlier lease of the same message (Kleppmann, "How to do distributed locking", 2016). Every write contains it, and is
refused once the lease has ended or another was granted. An owner that was frozen for too long renews its lease, if no other was
granted, and settles nothing otherwise.

If the store is unavailable, it raises, and the message is not run. `lease_store` opens the store that the settings name.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from django.utils.module_loading import import_string

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.wire.retry import Pause
from inbox.conf import IN_THE_DATABASE, InboxOptions
from inbox.handlers.kinds import Lease as Terms
from inbox.states import Outcome
from inbox.store import lease_rows
from inbox.store.message_rows import Failure, NewRow
from inbox.transactions.arrival import Arrival
from inbox.transactions.running import DatabaseUnavailable, committed

logger = escaping_logger(__name__)

T = TypeVar("T")
_P = ParamSpec("_P")

EXTENSIONS_PER_LEASE = 3


class LeaseStoreUnavailable(DatabaseUnavailable):
    """The lease store does not answer. Nothing was decided, and the message must not be run."""


@dataclass(eq=False, kw_only=True)
class Lease:
    """The right to run the message `arrival`.

    Attributes:
        terms: its duration, and the limit of a run.
        fence: the fencing token.
        attempt: which try this is, counted from 1.
        pk: the message's row, if it is known to have one.
        owner: the unique name of this lease, if the store uses one.
        steps: results of steps of earlier runs, as JSON by name; None for a step that was begun and never ended.
        began_at, ends_at: monotonic; the end is never later than the store's own.
        settling: its handler has ended, and the outcome is being stored.
        lost: it is known that it has ended or that another owner has it.
        without_store: its store was unavailable when it was to be extended or written to, so that it may have ended for that.
        is_reported: it is logged that it cannot be extended.
        stopping: the process has been asked to stop.
        next_at: when it is to be extended, monotonic.
        interrupted: a database that became unavailable has ended the run, so it is not counted as an attempt.
        following: the lease of the next message, which was granted in the commit that has consumed this one.
    """

    store: LeaseStore
    arrival: Arrival
    terms: Terms
    fence: int
    attempt: int
    began_at: float
    pk: int | None = None
    owner: str = ""
    steps: dict[str, str | None] = field(default_factory=dict)
    settling: bool = False
    lost: bool = False
    without_store: bool = False
    interrupted: bool = False
    is_reported: bool = False
    stopping: bool = False
    following: Lease | None = None

    def __post_init__(self) -> None:
        self.ends_at = self.began_at + self.terms.duration.total_seconds()
        self.limit_at = self.began_at + self.terms.limit.total_seconds()
        self.next_at = self.began_at + self.terms.duration.total_seconds() / EXTENSIONS_PER_LEASE

    def __str__(self) -> str:
        row = self.arrival.row
        return f"{row.handler}: message {row.message_id or 'without id'} (biz-id {row.biz_id}), fence {self.fence}"

    @property
    def is_over(self) -> bool:
        """Is it lost, or has it ended as far as this process knows?"""
        return self.lost or monotonic() >= self.ends_at


def renew(lease: Lease) -> bool:
    """Extend a lease that has ended, up to its limit. False: another owner has taken it, or it is at its limit.

    Its process was frozen for too long, or its store was unavailable.

    Raises:
        DatabaseUnavailable: the store does not answer.
    """
    now = monotonic()
    ends_at = min(now + lease.terms.duration.total_seconds(), lease.limit_at)
    if lease.lost or ends_at <= now:
        return False
    if not lease.store.extend(lease, timedelta(seconds=ends_at - now), stopping=lease.stopping):
        return False
    lease.ends_at, lease.without_store, lease.is_reported = ends_at, False, False
    return True


def store_as_owner(
    lease: Lease, what: str, write: Callable[Concatenate[Lease, _P], T], *given: _P.args, **named: _P.kwargs
) -> T:
    """Call a method of its store, which gets the lease first; while the store is unavailable, retry until the lease has ended.

    Raises:
        DatabaseUnavailable: the store was unavailable for longer.
    """
    pause = Pause()
    while True:
        try:
            return write(lease, *given, **named)
        except DatabaseUnavailable as outage:
            lease.without_store = True
            if lease.is_over:
                raise
            logger.warning("%s: %s cannot be stored now; this is retried until its lease ends: %s", lease, what, outage)
            time.sleep(pause.next_seconds())


class LeaseStore(Protocol):
    """A store of leases. Each call is atomic, and durable on return as far as the store is durable at all.

    Every method raises LeaseStoreUnavailable or DatabaseUnavailable if the store does not answer. A call that is repeated
    because its answer was lost gets the same answer.
    """

    def acquire(self, arrival: Arrival) -> Lease | Outcome | None:
        """Grant the right to run a message, and count its attempt.

        Without a lease: the outcome, if the store decides about the message; None, if its row does, or the claim has ended.

        Raises:
            ConcurrentDuplicate: another transaction is inserting its row and does not end in time.
            KeyBusy: another message of its key is running; nothing was decided.
        """

    def extend(self, lease: Lease, by: timedelta, *, stopping: bool = False) -> bool:
        """Move its end to `by` from now, also if it has ended and was not taken over. False: it is no longer ours.

        Args:
            stopping: record that its process has been asked to stop.
        """

    def remember(self, lease: Lease, step: str, result: str | None) -> bool:
        """Record a step's result, or with None that it has begun. False: the lease is no longer ours."""

    def consume(self, lease: Lease, following: Arrival | None = None) -> bool:
        """Record that the message is handled. False: the lease is no longer ours, and nothing is written.

        Args:
            following: the store may grant its first lease in the same commit, as `lease.following`.
        """

    def free(self, lease: Lease, failure: Failure) -> bool:
        """Store a failed message, for a retry or as a dead letter. False: as `consume`."""

    def forget(self, lease: Lease, step: str) -> None:
        """Delete the record of a step that was begun and has not ended, unless a later lease was granted."""

    def leave(self, lease: Lease) -> None:
        """The lease ended before its run. Ensure that a runner checks the message if no other owner takes it."""

    def is_held(self, alias: str, row: NewRow) -> bool:
        """Is this stored message running now, whatever its row says?"""

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """By handler, for messages without a row: `handled`, `duplicates` (also by cause), and `conflicts` among these."""


class DatabaseLeases:
    """Leases in the handler's own database: the record is the inbox row itself, and the clock is the database's.

    The row is stored, with its body, when the lease is acquired. So a duplicate can be acknowledged at once, and any runner
    takes over the message of a dead process when its lease has ended.
    """

    def __init__(self, options: InboxOptions) -> None:
        self._duplicate_timeout = options.DUPLICATE_TIMEOUT

    def acquire(self, arrival: Arrival, grant: Callable[..., lease_rows.Granted | None] | None = None) -> Lease | None:
        began_at, alias, terms = monotonic(), arrival.handler.using, arrival.terms
        # A duration that identifies the lease: its owner recognizes it if the answer to its request was lost.
        lasts = terms.duration + timedelta(microseconds=random.randrange(1, 100_000))
        granted = committed(alias, grant or self._grant, arrival, lasts, itertools.count())
        if granted is None:
            return None
        lease = Lease(
            store=self,
            arrival=arrival,
            terms=terms,
            fence=granted.fence,
            attempt=granted.attempt,
            pk=granted.row,
            began_at=began_at,
        )
        if granted.fence > 1:
            lease.steps = committed(alias, lease_rows.steps_of, granted.row)
        return lease

    def _grant(self, alias: str, arrival: Arrival, lasts: timedelta, tries: Iterator[int]) -> lease_rows.Granted | None:
        stored, is_retry = arrival.stored, next(tries) > 0
        if stored is not None:
            return lease_rows.lease_stored(alias, stored, lasts, arrival.exclusive_key)
        fresh = lease_rows.lease_fresh(alias, arrival.row, lasts, self._duplicate_timeout)
        return fresh or lease_rows.lease_over(alias, arrival.row, lasts, is_retry=is_retry)

    def extend(self, lease: Lease, by: timedelta, *, stopping: bool = False) -> bool:
        if _committed(lease, lease_rows.extend, by, stopping):
            return True
        return _committed(lease, lease_rows.renew, by, stopping, lease.arrival.exclusive_key)

    def remember(self, lease: Lease, step: str, result: str | None) -> bool:
        return _committed(lease, lease_rows.remember, step, result)

    def consume(self, lease: Lease, following: Arrival | None = None) -> bool:
        if following is None:
            return _committed(lease, lease_rows.consume, lease.arrival.order)
        consumed: list[bool] = []
        lease.following = self.acquire(following, partial(self._consume_and_grant, lease, consumed))
        return consumed[-1]

    def _consume_and_grant(
        self, lease: Lease, consumed: list[bool], alias: str, arrival: Arrival, lasts: timedelta, tries: Iterator[int]
    ) -> lease_rows.Granted | None:
        row, is_retry = arrival.row, next(tries) > 0
        is_ours, granted = lease_rows.consume_and_lease(alias, lease.pk or 0, lease.fence, row, lasts)
        consumed.append(is_ours)
        return granted or (lease_rows.lease_over(alias, row, lasts, is_retry=True) if is_retry else None)

    def free(self, lease: Lease, failure: Failure) -> bool:
        return _committed(lease, lease_rows.free, failure, lease.arrival.leaves(failure))

    def forget(self, lease: Lease, step: str) -> None:
        _committed(lease, lease_rows.forget_begun, step)

    def leave(self, lease: Lease) -> None:
        """Its row stays running until the lease ends."""

    def is_held(self, alias: str, row: NewRow) -> bool:
        """The row of a running message says so itself."""
        return False

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        return {}


def _committed(lease: Lease, write: Callable[..., T], *given: object) -> T:
    """Write as the owner of the lease, which is on a row."""
    alias = lease.arrival.handler.using
    return committed(alias, write, lease.pk, lease.fence, *given)


# Imported by name: its library is optional.
_REDIS = "inbox.contrib.redis_leases.redis_store.RedisLeases"
_opened: dict[tuple[str, str, timedelta, timedelta], LeaseStore] = {}


def lease_store(options: InboxOptions) -> LeaseStore:
    """The lease store, one for all threads of this process."""
    key = (options.LEASE_STORE, options.group, options.RETENTION, options.DUPLICATE_TIMEOUT)
    if key not in _opened:
        kind: Any = DatabaseLeases if options.LEASE_STORE == IN_THE_DATABASE else import_string(_REDIS)
        _opened.setdefault(key, kind(options))
    return _opened[key]
