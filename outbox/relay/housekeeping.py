"""Housekeeping beside the relay: make partitions ahead, drop history older than `KEEP_HISTORY`, delete old entries.

The entries are those of the trail and of the audit log, and bulk operations that have ended.

One relay process does this, by a lease, once a minute. Each step is a transaction of its own that can be repeated, so a process
may be killed between two steps, and two processes that do it at once do not disturb each other. No message depends on it: the
history of a day without a partition is in the default partition.

No step ends or delays a relay. A failed step is reported with its remedy, and tried again in the next round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from math import inf

from django.db import DatabaseError, InterfaceError, connections

from outbox.conf import OutboxOptions
from outbox.database.connections import drop_unusable_connections
from outbox.database.faults import is_canceled, is_collision, is_outage, sqlstate_of
from outbox.database.purging import delete_in_chunks, older_entries
from outbox.database.schema import describe_missing, is_missing
from outbox.kernel.clock import monotonic
from outbox.kernel.loop import StopRequest
from outbox.kernel.reminder import Reminder
from outbox.kernel.text import describe
from outbox.models import AuditEntry, TrailEntry
from outbox.operations import operations
from outbox.store import claiming, history, lease

logger = logging.getLogger(__name__)

_ROUND_SECONDS = 60.0
_LEASE = timedelta(seconds=180)
_DAYS_AHEAD = 3
_CHUNK = 500
_PAUSE_SECONDS = 0.02
"""After each deleted chunk, so that publishers on SQLite get the write lock in between."""
_PASS_MARGIN = timedelta(seconds=3)
"""A pass of a relay ends before BATCH_DEADLINE and this."""
_BETWEEN_WAITS_SECONDS = 3600.0
_PENDING_REPORT_SECONDS = 24 * 3600.0
_OWNER = (
    "housekeeping of %r: the database user of this relay may not make or drop partitions of history (%s). Messages are "
    "relayed; new history is in its default partition, and old rows are deleted one by one. Make that user the owner of the "
    "tables of the outbox, with the right to create tables in their schema."
)


class Housekeeper:
    """A companion of the relay that keeps the history of one database in order."""

    def __init__(self, alias: str, options: OutboxOptions) -> None:
        self._alias = alias
        self._options = options
        self._lease = lease.Lease(alias, _LEASE, name="housekeeping")
        self._errors = Reminder()
        self._refusals = Reminder()
        self._reported_pending_at = -inf
        self._wait_again_at = -inf
        self._deleted_until = 0
        self._unmakeable: set[int] = set()

    def run(self, stop: StopRequest) -> None:
        try:
            while not stop:
                self._round(stop)
                stop.wait(_ROUND_SECONDS)
            self._release_lease()
        finally:
            connections.close_all()

    def drain(self, stop: StopRequest) -> int:
        """Do one round; return 0, because it makes no message ready."""
        self._round(stop)
        self._release_lease()
        return 0

    def _round(self, stop: StopRequest) -> None:
        """Do every step, unless another process holds the lease."""
        try:
            drop_unusable_connections()
            if not self._lease.take():
                return
            if claiming.claims_by_locks(self._alias):
                self._make_days()
                self._drop_days()
            self._report_pending_days()
            self._delete_days(stop)
            old = older_entries(TrailEntry, self._alias, self._options.TRAIL_RETENTION)
            self._delete(delete_in_chunks(old, by="at", chunk=_CHUNK), stop)
            audited = older_entries(AuditEntry, self._alias, self._options.AUDIT_RETENTION)
            self._delete(delete_in_chunks(audited, by="at", chunk=_CHUNK), stop)
            ended = operations.ended(self._alias, self._options.OPERATION_RETENTION)
            self._delete(delete_in_chunks(ended, by="ended_at", chunk=_CHUNK), stop)
        except Exception as error:
            connections[self._alias].close()
            if is_missing(error):
                if self._errors.is_due():
                    logger.log(logging.ERROR, "housekeeping: %s It is tried again.", describe_missing(error, self._alias))
            elif is_outage(error) or is_collision(error):
                logger.debug("housekeeping of %r: %s", self._alias, error)  # the relay reports an outage
            elif self._errors.is_due():
                logger.exception("Unexpected error in the housekeeping of %r; it is tried again.", self._alias)

    def _make_days(self) -> None:
        today, existing = history.day_of(self._alias), set(history.days(self._alias))
        for day in range(today, today + _DAYS_AHEAD + 1):
            if day not in existing | self._unmakeable:
                self._attempt(history.make_day, day, is_urgent=day <= today + 1)

    def _drop_days(self) -> None:
        last = self._last
        for day in history.days(self._alias):
            if day <= last and self._attempt(history.drop_day, day, is_urgent=day < last):
                logger.info("Dropped the outbox's history of %s.", history.date_of(day))

    def _delete_days(self, stop: StopRequest) -> None:
        """Delete old rows; those of the default partition once for each day, because that reads all of it."""
        last = self._last
        if last != self._deleted_until and self._delete(history.delete_days(self._alias, last, chunk=_CHUNK), stop):
            self._deleted_until = last if claiming.claims_by_locks(self._alias) else 0

    @property
    def _last(self) -> int:
        """The last day that is older than the retention from beginning to end."""
        return history.day_of(self._alias, self._options.keeps) - 1

    def _attempt(self, change: Callable[[str, int, timedelta | None], bool], day: int, *, is_urgent: bool) -> bool:
        """Make or drop the partition of a day. If that is impossible now, log why; the next round tries again.

        Args:
            is_urgent: wait for history as long as a pass may last. Other passes wait meanwhile, so a wait in vain, as behind
                a backup, is not repeated for an hour.
        """
        waits = is_urgent and monotonic() >= self._wait_again_at
        try:
            return change(self._alias, day, self._options.BATCH_DEADLINE + _PASS_MARGIN if waits else None)
        except DatabaseError as error:
            if waits and sqlstate_of(error) != history.CHECK_VIOLATION:
                self._wait_again_at = monotonic() + _BETWEEN_WAITS_SECONDS
            if sqlstate_of(error) == history.INSUFFICIENT_PRIVILEGE:
                if self._refusals.is_due():
                    logger.warning(_OWNER, self._alias, describe(error))
            elif is_collision(error) or is_canceled(error):
                # For example, a transaction that reads or writes history is open. Waiting for it would delay the relays.
                logger.debug("History of %s is in use: %s", history.date_of(day), error)
            elif sqlstate_of(error) == history.CHECK_VIOLATION:
                self._unmakeable.add(day)
            else:
                raise
            return False

    def _report_pending_days(self) -> None:
        if monotonic() - self._reported_pending_at < _PENDING_REPORT_SECONDS:
            return
        if pending := history.days_with_pending_callbacks(self._alias, self._last):
            self._reported_pending_at = monotonic()
            logger.warning(
                "housekeeping: history of %s is older than OUTBOX['KEEP_HISTORY'] and is not dropped, because callbacks of its "
                "messages are pending. See outbox_status, or the pending callbacks in the admin.",
                ", ".join(str(history.date_of(day)) for day in pending),
            )

    def _delete(self, chunks: Iterator[int], stop: StopRequest) -> bool:
        """Delete them chunk by chunk. False: it was interrupted."""
        renew_at = monotonic() + _ROUND_SECONDS
        for _ in chunks:
            if stop.wait(_PAUSE_SECONDS):
                return False
            if monotonic() >= renew_at:
                if not self._lease.take():
                    return False
                renew_at = monotonic() + _ROUND_SECONDS
        return True

    def _release_lease(self) -> None:
        try:
            self._lease.release()
        except (DatabaseError, InterfaceError) as error:
            logger.debug("The housekeeping's lease was not released: %s", error)


def housekeepers(alias: str, options: OutboxOptions) -> Sequence[Housekeeper]:
    """The housekeeper of a relay process; none inside the transaction of a test, which makes no partitions."""
    return () if connections[alias].in_atomic_block else (Housekeeper(alias, options),)
