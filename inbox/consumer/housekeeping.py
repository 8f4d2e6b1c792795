"""Housekeeping beside a process that runs handlers: delete what `exactly_once_purge` deletes, see `operators.housekeeping`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from hashlib import sha256
from math import inf

from django.db import DEFAULT_DB_ALIAS, connections

from exactly_once.operators.housekeeping import CHUNK, Housekeeping
from exactly_once.operators.leases import TableLease
from exactly_once.operators.minutes import database_time
from exactly_once.process.clock import monotonic
from exactly_once.process.loop import StopRequest
from inbox.conf import inbox_options
from inbox.handlers.registry import registry
from inbox.models import TrailEntry
from inbox.operators.operations import operations
from inbox.operators.purging import purge_settled

_READ_ALL_SECONDS = 3600.0


class Housekeeper(Housekeeping):
    """Deletes settled messages of one database that are older than `RETENTION`, and old entries.

    One process of each service does so, because it keeps the messages of the others. Services may have the same GROUP, such as
    the default "config". So the lease's name is a digest of the handlers, too, and fits its column.
    """

    app = "inbox"

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        service = [inbox_options().group, *sorted(handler.name for handler in registry.all())]
        self._lease = TableLease(alias, f"inbox: housekeeping {sha256(repr(service).encode()).hexdigest()[:32]}")

        self._purged_until: datetime | None = None
        self._read_all_at = -inf

    def _steps(self, stop: StopRequest) -> None:
        options = inbox_options()
        # Those that stay, as another service's, may be many, so they are read once an hour and not in each round.
        since = None if (now := monotonic()) >= self._read_all_at else self._purged_until
        until = database_time(self._alias) - options.RETENTION
        if self._delete(purge_settled(self._alias, options.RETENTION, chunk=CHUNK, since=since), stop):
            self._purged_until = until
            if since is None:
                self._read_all_at = now + _READ_ALL_SECONDS
        self._delete_entries(TrailEntry, operations, options, stop)


def housekeepers() -> Sequence[Housekeeper]:
    """One for each database of the handlers; none inside the transaction of a test."""
    aliases = {handler.using for handler in registry.all()} or {DEFAULT_DB_ALIAS}
    return [Housekeeper(alias) for alias in sorted(aliases) if not connections[alias].in_atomic_block]
