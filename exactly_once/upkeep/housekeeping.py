"""Housekeeping beside the processes of both apps: delete rows that are older than their retention, in small transactions.

One process does this for each app and database, by a lease, once a minute. Each step is a transaction of its own that can be
repeated, so a process may be killed between two steps, and two processes that do it at once do not disturb each other. No
message depends on it.

No step ends or delays its process. A failed step is reported with its remedy, and tried again in the next round.
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple

from django.db import connections
from django.db.models import Model, QuerySet
from django.utils.translation import gettext as _

from exactly_once.models import AuditEntry
from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.process.loop import StopRequest
from exactly_once.sql.deletions import delete_matching
from exactly_once.sql.now import DatabaseTime
from exactly_once.sql.turns import Turns
from exactly_once.upkeep.loop_leases import TableLease
from exactly_once.upkeep.operation_rows import OperationTable

logger = escaping_logger(__name__)

_LEASE = timedelta(seconds=180)
CHUNK = 500
_ROUND_SECONDS = 60.0
_PAUSE_SECONDS = 0.02
"""After each deleted chunk, so that publishers on SQLite get the write lock in between."""


def older_entries(trail: type[Model], alias: str, older_than: timedelta) -> QuerySet[Any]:
    """The entries of a trail that are older than `older_than`."""
    return QuerySet(trail, using=alias).filter(at__lt=DatabaseTime(-older_than))


def delete_in_chunks(rows: QuerySet[Any], *, by: str, chunk: int = 1000) -> Iterator[int]:
    """Delete the rows in the order of the field `by`, in small transactions; yield the number deleted in each."""
    while ids := list(rows.order_by(by).values_list("pk", flat=True)[:chunk]):
        yield delete_matching(rows.filter(pk__in=ids))


class OldRows(NamedTuple):
    """Rows of one kind that are older than their retention, and the field of their order."""

    name: str
    rows: QuerySet[Any]
    by: str = "at"


more_old_rows: dict[str, Callable[[str], Iterable[OldRows]]] = {}
"""By the label of an optional app that belongs to neither half: takes a database; returns what to delete there."""


def old_rows(app: str, alias: str, entries: type[Model], options: Any) -> Iterator[OldRows]:
    """What is deleted besides messages."""
    audited = older_entries(AuditEntry, alias, options.AUDIT_RETENTION).filter(app=app)
    yield OldRows(_("entries of the trail"), older_entries(entries, alias, options.TRAIL_RETENTION))
    yield OldRows(_("entries of the audit log"), audited)
    yield OldRows(_("bulk operations"), OperationTable(app).ended(alias, options.TRAIL_RETENTION), by="ended_at")


def optional_old_rows(alias: str) -> Iterator[OldRows]:
    """What is deleted besides of optional apps that belong to neither half."""
    for more in more_old_rows.values():
        yield from more(alias)


class Housekeeping:
    """A companion that keeps the tables of one app in one database in order; a subclass has its steps.

    One process at a time does so, by a lease.
    """

    app: str

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._lease = TableLease(alias, f"{self.app}: housekeeping")
        self._turns = Turns("housekeeping", "Unexpected error in the housekeeping of %r; it is tried again.")

    def run(self, stop: StopRequest) -> None:
        try:
            while not stop:
                self._round(stop)
                stop.wait(_ROUND_SECONDS)
            self.release_lease()
        finally:
            connections.close_all()

    def drain(self, stop: StopRequest) -> int:
        """Do one round; return 0, because it makes no message ready."""
        self._round(stop)
        self.release_lease()
        return 0

    def _steps(self, stop: StopRequest) -> None:
        """What is done in a round."""
        raise NotImplementedError

    def _round(self, stop: StopRequest) -> None:
        """Do every step, unless another process holds the lease."""

        def steps() -> None:
            if self.take_lease():
                self._steps(stop)

        self._turns.take(self._alias, steps, stop)

    def _delete_entries(self, entries: type[Model], options: Any, stop: StopRequest) -> None:
        """Delete old entries of the trail and of the audit log, and bulk operations that have ended."""
        for old in chain(old_rows(self.app, self._alias, entries, options), optional_old_rows(self._alias)):
            self._delete(delete_in_chunks(old.rows, by=old.by, chunk=CHUNK), stop)

    def _delete(self, chunks: Iterator[int], stop: StopRequest) -> bool:
        """Delete them chunk by chunk. False: it was interrupted."""
        renew_at = monotonic() + _ROUND_SECONDS
        for _deleted in chunks:
            if stop.wait(_PAUSE_SECONDS):
                return False
            if monotonic() >= renew_at:
                if not self.take_lease():
                    return False
                renew_at = monotonic() + _ROUND_SECONDS
        return True

    def take_lease(self) -> bool:
        """Take the lease, or renew it. False: another process holds it."""
        return self._lease.take(_LEASE)

    def release_lease(self) -> None:
        """Let another process take it at once."""
        self._lease.release()
