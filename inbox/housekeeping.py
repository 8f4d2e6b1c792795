"""Housekeeping beside a process that runs handlers: the days of history are made and dropped, and what is old is deleted.

Deleted are history, receipts, and what other tables have about deleted messages. Several services on one database delete each
other's rows, too, but only after the time for which the service of the handler keeps them; see `inbox.store.handler_rows`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from math import inf
from typing import Any

from django.db import connections, router
from django.db.models import Model, Q, QuerySet

from exactly_once.process.clock import monotonic
from exactly_once.process.loop import StopRequest
from exactly_once.sql.days import LIVE, last_day
from exactly_once.sql.deletions import delete_matching
from exactly_once.sql.now import DatabaseTime
from exactly_once.sql.partitions import days_by
from exactly_once.upkeep.history import DayKeeper, History
from exactly_once.upkeep.housekeeping import CHUNK, Housekeeping
from exactly_once.upkeep.loop_leases import TableLease
from exactly_once.upkeep.minutes import database_time
from exactly_once.wire.formats import RUN_ELSEWHERE
from inbox.conf import inbox_options
from inbox.handlers.registry import registry
from inbox.models import InboxMessage, Receipt, Step, TrailEntry
from inbox.store import handler_rows
from inbox.store.receipts import handlers_with_topics

_LONGEST_WAIT = timedelta(seconds=2)
"""New deliveries wait as long. A handler's transaction holds a lock of history from its first statement on."""
_READ_ALL_SECONDS = 3600.0


handlers_elsewhere: list[Callable[[str], Iterable[str]]] = []
"""By alias, the names of handlers of this service that are not registered. An optional package adds its own."""


def record_periods(alias: str) -> None:
    """Record for how long this service keeps the rows of its handlers."""
    ours = [handler.name for handler in registry.all() if handler.using == alias]
    handler_rows.record_periods(alias, [*ours, *(name for names in handlers_elsewhere for name in names(alias))])


def _staying(alias: str) -> Iterator[tuple[list[str], int]]:
    """Handlers whose history is not deleted by the settings of this service, each with the last day that may be deleted."""
    kept, ours = handler_rows.recorded_periods(alias, "history"), inbox_options().keeps
    others = {
        name: period
        for name, period in kept.items()
        if not (registry.get(name) or (period == ours and name.startswith(RUN_ELSEWHERE)))
    }
    for period, names in handler_rows.by_period(others).items():
        yield names, last_day(alias, period)
    having = {name for name, _ in handlers_with_topics(alias, sys.maxsize)}
    yield [name for name in having - kept.keys() if not registry.get(name)], LIVE


def _stays(alias: str) -> Q:
    stays = Q(pk__in=())
    for names, last in _staying(alias):
        stays |= Q(handler__in=names, day__gt=last)
    return stays


def _has_rows_that_stay(alias: str, day: int) -> Callable[[], bool]:
    names = [name for names, last in _staying(alias) if day > last for name in names]
    return HISTORY.rows(alias).filter(handler__in=names, day=day).exists


def _ended(alias: str) -> Q:
    ended = Q(pk__in=())
    for period, names in handler_rows.by_period(handler_rows.recorded_periods(alias, "retention")).items():
        until = DatabaseTime(-period)
        ended |= Q(handler__in=names, received_at__lt=until) & ~Q(retried_at__gte=until)
    return ended


HISTORY = History(
    model=InboxMessage,
    by="id",
    # A row with new content may have its only copy, so it stays as if it had been settled then.
    instants=("settled_at", "conflicting_at"),
    stays=_stays,
    keeps=_has_rows_that_stay,
)


@dataclass(frozen=True, kw_only=True)
class Remains:
    """Rows of a table that outlive their message.

    Attributes:
        message: the field with the id of the message.
        at: the field with the instant from which they are kept, and `kept`, by alias, at least how long. Their primary keys are
            in its order, but for single ones.
        ended: by alias, the condition of rows that need not be kept, if that is not the same for all.
    """

    model: type[Model]
    message: str
    at: str
    kept: Callable[[str], timedelta] = lambda _: inbox_options().keeps
    ended: Callable[[str], Q] = lambda _: Q()

    def count(self, alias: str) -> int:
        """How many `deletions` would delete."""
        return sum(rows.count() for rows in self._gone(alias))

    def _old(self, alias: str) -> QuerySet[Any]:
        old = Q(**{f"{self.at}__lt": DatabaseTime(-self.kept(alias))})
        return QuerySet(self.model, using=alias).filter(old, self.ended(alias))

    def deletions(self, alias: str, *, chunk: int = 1000, walk: Walk | None = None) -> Iterator[int]:
        """Delete them in small transactions, in the order of their keys, until all that are read are too young."""
        for rows in self._gone(alias, chunk, walk):
            yield delete_matching(rows)

    def _gone(self, alias: str, chunk: int = 1000, walk: Walk | None = None) -> Iterator[QuerySet[Any]]:
        """What is deleted, in parts. A database may not have the table."""
        if not router.allow_migrate_model(alias, self.model):
            return
        walk, until = walk or Walk(), database_time(alias) - self.kept(alias)
        walk.begin()
        keys: QuerySet[Any] = QuerySet(self.model, using=alias).order_by("pk").values_list("pk", self.at)
        while found := list(keys.filter(pk__gt=walk.last)[:chunk]):
            if min(at for _, at in found) >= until:
                return
            last = found[-1][0]
            messages = dict(self._old(alias).filter(pk__gte=found[0][0], pk__lte=last).values_list("pk", self.message))
            # Not by a condition on the messages, which would lock all of history.
            stored = days_by(InboxMessage.objects.using(alias), "pk", {*messages.values()}) if messages else {}
            gone = [pk for pk, message in messages.items() if message not in stored]
            yield self._old(alias).filter(pk__in=gone)
            walk.last = last


@dataclass
class Walk:
    """How far a table has been read. Rows that stay may be many, so they are read again only once an hour."""

    last: int = 0
    again_at: float = -inf

    def begin(self) -> None:
        if (now := monotonic()) >= self.again_at:
            self.last, self.again_at = 0, now + _READ_ALL_SECONDS


remains = {
    "receipts": Remains(
        model=Receipt,
        message="pk",
        at="received_at",
        kept=lambda alias: min(handler_rows.recorded_periods(alias, "retention").values(), default=inbox_options().RETENTION),
        ended=_ended,
    ),
    "steps": Remains(model=Step, message="message_id", at="taken_at"),
}
"""By name. An optional package that stores more about messages adds its own."""


class Housekeeper(Housekeeping):
    """Makes and drops the days of history of one database, and deletes what is older than its retention.

    One process of each service does so, because each records its own periods. Services may have the same GROUP, such as the
    default "config". So the lease's name is a digest of the handlers, too, and fits its column.
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
        record_periods(self._alias)
        last = last_day(self._alias, options.keeps)
        self._days.keep(last)
        self._delete(self._days.deletions(last, chunk=CHUNK), stop)
        for name, kind in remains.items():
            self._delete(kind.deletions(self._alias, chunk=CHUNK, walk=self._walks[name]), stop)
        self._delete_entries(TrailEntry, options, stop)


def databases() -> list[str]:
    """The databases of the handlers of this process."""
    return sorted({handler.using for handler in registry.all()} or {router.db_for_write(InboxMessage)})


def housekeepers() -> Sequence[Housekeeper]:
    """One for each database of the handlers; none inside the transaction of a test."""
    return [Housekeeper(alias) for alias in databases() if not connections[alias].in_atomic_block]
