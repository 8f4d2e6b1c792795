"""Housekeeping beside a process that runs handlers: the days of history are made and dropped, and what is old is deleted.

Deleted are history, receipts, and what other tables have about deleted messages. Of several services on one database, each
deletes the rows of its own handlers, those of Celery tasks and webhook endpoints, and those of handlers that no process has
lately run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from math import inf
from typing import Any

from django.db import connections, router
from django.db.models import Exists, Model, OuterRef, Q, QuerySet

from exactly_once.operators.day_keeper import DayKeeper
from exactly_once.operators.history import History
from exactly_once.operators.housekeeping import CHUNK, Housekeeping
from exactly_once.operators.leases import TableLease
from exactly_once.operators.minutes import database_time
from exactly_once.process.clock import monotonic
from exactly_once.process.loop import StopRequest
from exactly_once.sql.days import last_day
from exactly_once.sql.now import DatabaseTime
from inbox.conf import InboxOptions, inbox_options
from inbox.handlers.registry import may_exist, registry
from inbox.models import InboxMessage, Receipt, Step, TrailEntry
from inbox.operators.operations import aliases, operations
from inbox.operators.processes import lately_running_handlers

_LONGEST_WAIT = timedelta(seconds=2)
"""New deliveries wait as long. A handler's transaction holds a lock of history from its first statement on."""
_READ_ALL_SECONDS = 3600.0


def _of_other_services(alias: str) -> Q:
    return Q(handler__in=[name for name in lately_running_handlers(alias) if not may_exist(name)])


def _has_rows_of_others(alias: str, day: int) -> bool:
    return HISTORY.rows(alias).filter(_of_other_services(alias), day=day).exists()


HISTORY = History(
    model=InboxMessage,
    by="id",
    # A row with new content may have its only copy, so it stays as if it had been settled then.
    instants=("settled_at", "conflicting_at"),
    stays=_of_other_services,
    keeps=_has_rows_of_others,
)


@dataclass(frozen=True, kw_only=True)
class Remains:
    """Rows of a table that outlive their message.

    Attributes:
        message: the field with the id of the message.
        at: the field with the instant from which they are kept, and `kept` how long. Their primary keys are in its order.
        stays: by alias, the condition of rows that are not deleted.
    """

    name: str
    model: type[Model]
    message: str
    at: str
    kept: Callable[[InboxOptions], timedelta] = lambda options: options.KEEP_HISTORY
    stays: Callable[[str], Q] = lambda _: Q(pk__in=())

    def rows(self, alias: str) -> QuerySet[Model]:
        """What is deleted. A database may not have the table."""
        if not router.allow_migrate_model(alias, self.model):
            return QuerySet(self.model, using=alias).none()
        old = Q(**{f"{self.at}__lt": DatabaseTime(-self.kept(inbox_options()))})
        has_message = Exists(InboxMessage.objects.using(alias).filter(pk=OuterRef(self.message)))
        return QuerySet(self.model, using=alias).filter(old).exclude(self.stays(alias)).exclude(has_message)

    def deletions(self, alias: str, *, chunk: int = 1000, walk: Walk | None = None) -> Iterator[int]:
        """Delete them in small transactions, in the order of their keys, up to the first that are too young."""
        if not router.allow_migrate_model(alias, self.model):
            return
        walk, until = walk or Walk(), database_time(alias) - self.kept(inbox_options())
        walk.begin()
        keys: QuerySet[Any] = QuerySet(self.model, using=alias).order_by("pk").values_list("pk", self.at)
        while found := list(keys.filter(pk__gt=walk.last)[:chunk]):
            last, youngest = found[-1][0], max(at for _, at in found)
            yield self.rows(alias).filter(pk__gte=found[0][0], pk__lte=last).delete()[1].get(self.model._meta.label, 0)
            if youngest >= until:
                return
            walk.last = last


@dataclass
class Walk:
    """How far a table has been read. Rows that stay may be many, so they are read again only once an hour."""

    last: int = 0
    again_at: float = field(default=-inf)

    def begin(self) -> None:
        if (now := monotonic()) >= self.again_at:
            self.last, self.again_at = 0, now + _READ_ALL_SECONDS


remains: dict[str, Remains] = {}
"""By name. An optional package that stores more about messages adds its own."""


def add_remains(*kinds: Remains) -> None:
    remains.update((kind.name, kind) for kind in kinds)


add_remains(
    Remains(
        name="receipts",
        model=Receipt,
        message="pk",
        at="received_at",
        kept=lambda options: options.RETENTION,
        stays=_of_other_services,
    ),
    Remains(name="steps", model=Step, message="message_id", at="taken_at"),
)


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
    return [Housekeeper(alias) for alias in aliases() if not connections[alias].in_atomic_block]
