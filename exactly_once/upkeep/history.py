"""History, the settled messages of an app: days are made ahead and dropped, or rows deleted where a day cannot be dropped.

On PostgreSQL history has one partition for each day of settling, see `exactly_once.sql.partitions`; a row of a day without a
partition is in the default partition. On SQLite history is the rows whose `day` is not `LIVE`. They are deleted in small
transactions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import Any

from django.db import DatabaseError, connections
from django.db.models import Model, Q, QuerySet

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import Reminder, escaping_logger
from exactly_once.sql import faults
from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.days import FIRST_DAY, date_of, day_of
from exactly_once.sql.deletions import delete_matching
from exactly_once.sql.now import DatabaseTime
from exactly_once.sql.partitions import Days, windows
from exactly_once.upkeep.housekeeping import delete_in_chunks
from exactly_once.wire.text import describe

logger = escaping_logger(__name__)

_DAYS_AHEAD = 3
_BETWEEN_WAITS_SECONDS = 3600.0
_OWNER = (
    "housekeeping of %r: the database user of this process may not make or drop partitions of the history of the %s (%s). "
    "Messages are processed; new history is in its default partition, and old rows are deleted one by one. Make that user the "
    "owner of the tables, with the right to create tables in their schema."
)
_NAME_IN_USE = (
    "housekeeping of %r: the table %s exists, and is not a partition of the history of the %s. History of that day is in the "
    "default partition. If the table was detached, attach it again or rename it."
)


@dataclass(frozen=True, kw_only=True)
class History:
    """The history of one table.

    Attributes:
        by: a unique field, the primary key of each partition of history.
        instants: the fields of the instants from which a row is kept; the latest counts.
        stays: by alias, the condition of rows that are not deleted, whatever their age.
        keeps: by alias and day, the question whether the day has such a row. It is asked while the partition is locked; what it
            needs of other tables is read before.
    """

    model: type[Model]
    by: str
    instants: Sequence[str]
    stays: Callable[[str], Q]
    keeps: Callable[[str, int], Callable[[], bool]]

    @property
    def days(self) -> Days:
        return Days(self.model._meta.db_table, self.by)

    def rows(self, alias: str) -> QuerySet[Any]:
        return QuerySet(self.model, using=alias).filter(day__gte=FIRST_DAY)

    def drop_day(self, alias: str, day: int, longest_wait: timedelta | None = None) -> bool:
        """Drop the partition of this day. False: it does not exist, or has a row that stays.

        Raises:
            django.db.Error: see `Days.drop`.
        """
        return self.days.drop(alias, day, longest_wait, keeps=self.keeps(alias, day))

    def purge(self, alias: str, older_than: timedelta, *, chunk: int = 1000) -> Iterator[int]:
        """Delete the messages that were settled longer ago than this; yields the number of rows deleted by each step.

        Whole days are dropped where that is possible at once. Other rows are deleted in small transactions.
        """
        if is_postgresql(connections[alias]):
            for day in self.days.existing(alias):
                if day < day_of(alias, older_than) and (count := self._dropped(alias, day)):
                    yield count
        yield from self._deleted(self._older(alias, older_than), chunk)

    def purgeable(self, alias: str, older_than: timedelta) -> int:
        """The number of rows that `purge` would delete."""
        rows = self._older(alias, older_than)
        return sum(rows.filter(**days).count() for days in (windows(rows) if is_postgresql(connections[alias]) else [{}]))

    def delete_days(self, alias: str, last: int, *, chunk: int) -> Iterator[int]:
        """Delete the rows of all days up to `last`; yields the number of rows deleted by each small transaction.

        On PostgreSQL it deletes rows of the default partition, and of partitions that could not be dropped for a day.
        """
        rows = self._old(alias).filter(day__lte=last)
        if is_postgresql(connections[alias]):
            overdue = [day for day in self.days.existing(alias) if day < last]
            days = overdue + self.days.in_default(alias, last)
            rows = rows.filter(day__in=days) if days else rows.none()
        yield from self._deleted(rows, chunk)

    def _old(self, alias: str) -> QuerySet[Any]:
        return self.rows(alias).exclude(self.stays(alias))

    def _older(self, alias: str, older_than: timedelta) -> QuerySet[Any]:
        before = DatabaseTime(-older_than)
        return self._old(alias).filter(*(Q(**{name: None}) | Q(**{f"{name}__lt": before}) for name in self.instants))

    def _deleted(self, rows: QuerySet[Any], chunk: int) -> Iterator[int]:
        """Delete along an index: on PostgreSQL each chunk starts after the last, so that it does not read the deleted rows.

        A statement there reads a few days, because it locks what it reads.
        """
        if not is_postgresql(connections[rows.db]):
            yield from delete_in_chunks(rows, by="day", chunk=chunk)
            return
        for days in windows(rows):
            yield from self._deleted_along(rows.filter(**days), chunk)

    def _deleted_along(self, rows: QuerySet[Any], chunk: int) -> Iterator[int]:
        values, last = rows.order_by(self.by).values_list(self.by, flat=True), None
        while found := list(values[:chunk] if last is None else values.filter(**{f"{self.by}__gt": last})[:chunk]):
            last = found[-1]
            # With all conditions again: a message restored meanwhile may be settled again.
            yield delete_matching(rows.filter(**{f"{self.by}__in": found}))

    def _dropped(self, alias: str, day: int) -> int:
        """Drop this day; the number of its rows. 0: it could not be dropped, so its rows have to be deleted."""
        try:
            count = self.rows(alias).filter(day=day).count()
            return count if self.drop_day(alias, day) else 0
        except DatabaseError as error:
            is_in_use = faults.is_collision(error) or faults.is_canceled(error)
            if is_in_use or faults.sqlstate_of(error) == faults.INSUFFICIENT_PRIVILEGE:
                return 0
            raise


class DayKeeper:
    """The days of one history in one database.

    Args:
        longest_wait: for a lock, if a change is urgent. Others wait meanwhile, so a wait in vain, as behind a backup, is not
            repeated for an hour. None: no change waits for longer than `partitions.LONGEST_WAIT`.
    """

    def __init__(self, app: str, alias: str, history: History, longest_wait: timedelta | None = None) -> None:
        self._app, self._alias = app, alias
        self._history = history
        self._longest_wait = longest_wait
        self._refusals, self._name_in_use = Reminder(), Reminder()
        self._wait_again_at = -inf
        self._unmakeable: set[int] = set()
        self._deleted_until = 0

    def keep(self, last: int) -> None:
        """Make the partitions of the days ahead, and drop those of the days up to `last`. SQLite has none."""
        if not is_postgresql(connections[self._alias]):
            return
        days, today = self._history.days, day_of(self._alias)
        existing = days.existing(self._alias)
        for day in range(today, today + _DAYS_AHEAD + 1):
            if day not in {*existing} | self._unmakeable:
                self._attempt(days.make, day, is_urgent=day <= today + 1)
        for day in existing:
            if day > last or self._history.keeps(self._alias, day)():
                continue
            if not self._attempt(self._history.drop_day, day, is_urgent=day < last):
                return  # each try delays those who write history
            logger.info("Dropped the history of the %s of %s.", self._app, date_of(day))

    def deletions(self, last: int, *, chunk: int) -> Iterator[int]:
        """Delete the rows up to the day `last` whose days could not be dropped, once for each day; see `History`."""
        if last != self._deleted_until:
            yield from self._history.delete_days(self._alias, last, chunk=chunk)
            # Rows of a default partition are read all, so they are read once. On SQLite a row of an old day may be added.
            self._deleted_until = last if is_postgresql(connections[self._alias]) else 0

    def _attempt(self, change: Callable[[str, int, timedelta | None], bool], day: int, *, is_urgent: bool) -> bool:
        """Make or drop the partition of a day. If that is impossible now, log why; the next round tries again."""
        waits = self._longest_wait is not None and is_urgent and monotonic() >= self._wait_again_at
        try:
            return change(self._alias, day, self._longest_wait if waits else None)
        except DatabaseError as error:
            if waits and faults.sqlstate_of(error) not in {faults.CHECK_VIOLATION, faults.DUPLICATE_TABLE}:
                self._wait_again_at = monotonic() + _BETWEEN_WAITS_SECONDS
            if faults.sqlstate_of(error) == faults.INSUFFICIENT_PRIVILEGE:
                if self._refusals.is_due():
                    logger.warning(_OWNER, self._alias, self._app, describe(error))
            elif faults.sqlstate_of(error) == faults.CHECK_VIOLATION:
                self._unmakeable.add(day)
            elif faults.sqlstate_of(error) == faults.DUPLICATE_TABLE:
                if self._name_in_use.is_due():
                    logger.warning(_NAME_IN_USE, self._alias, self._history.days.name(day), self._app)
            elif faults.is_collision(error) or faults.is_canceled(error):
                # For example, a transaction that reads or writes history is open. Waiting for it would delay the others.
                logger.debug("History of %s is in use: %s", date_of(day), error)
            else:
                raise
            return False
