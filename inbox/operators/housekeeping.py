"""Housekeeping beside a process that runs handlers: the days of history, and what `operators.purging` deletes."""

from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256

from django.db import DEFAULT_DB_ALIAS, connections

from exactly_once.operators.day_keeper import DayKeeper
from exactly_once.operators.housekeeping import CHUNK, Housekeeping
from exactly_once.operators.leases import TableLease
from exactly_once.process.loop import StopRequest
from exactly_once.sql.days import last_day
from inbox.conf import inbox_options
from inbox.handlers.registry import registry
from inbox.models import TrailEntry
from inbox.operators.operations import operations
from inbox.operators.purging import HISTORY, Walk, remains

_LONGEST_WAIT = timedelta(seconds=2)
"""New deliveries wait as long. A handler's transaction holds a lock of history from its first statement on."""


class Housekeeper(Housekeeping):
    """Makes and drops the days of history of one database, and deletes what is older than its retention.

    One process of each service does so, because it keeps the messages of the others. Services may have the same GROUP, such as
    the default "config". So the lease's name is a digest of the handlers, too, and fits its column.
    """

    app = "inbox"

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        service = [inbox_options().group, *sorted(handler.name for handler in registry.all())]
        self._lease = TableLease(alias, f"inbox: housekeeping {sha256(repr(service).encode()).hexdigest()[:32]}")
        self._days = DayKeeper("inbox", alias, HISTORY, _LONGEST_WAIT)
        self._walks = {name: Walk() for name in remains}

    def _steps(self, stop: StopRequest) -> None:
        options = inbox_options()
        last = last_day(self._alias, options.KEEP_HISTORY)
        self._days.keep(last)
        self._delete(self._days.deletions(last, chunk=CHUNK), stop)
        for name, kind in remains.items():
            self._delete(kind.deletions(self._alias, chunk=CHUNK, walk=self._walks[name]), stop)
        self._delete_entries(TrailEntry, operations, options, stop)


def housekeepers() -> Sequence[Housekeeper]:
    """One for each database of the handlers; none inside the transaction of a test."""
    aliases = {handler.using for handler in registry.all()} or {DEFAULT_DB_ALIAS}
    return [Housekeeper(alias) for alias in sorted(aliases) if not connections[alias].in_atomic_block]
