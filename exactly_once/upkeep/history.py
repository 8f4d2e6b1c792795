"""History, the settled messages of an app: its days are dropped, or rows are deleted where a day cannot be dropped.

On PostgreSQL history has one partition for each day of settling, see `exactly_once.sql.partitions`; a row of a day without a
partition is in the default partition. On SQLite history is the rows whose `day` is not `LIVE`. They are deleted in small
transactions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import DatabaseError, connections
from django.db.models import Model, Q, QuerySet

from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.days import FIRST_DAY, day_of
from exactly_once.sql.faults import INSUFFICIENT_PRIVILEGE, is_canceled, is_collision, sqlstate_of
from exactly_once.sql.finding import windows
from exactly_once.sql.now import DatabaseTime
from exactly_once.sql.partitions import Days
from exactly_once.sql.rows import delete_in_chunks


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
            yield rows.filter(**{f"{self.by}__in": found}).delete()[0]

    def _dropped(self, alias: str, day: int) -> int:
        """Drop this day; the number of its rows. 0: it could not be dropped, so its rows have to be deleted."""
        try:
            count = self.rows(alias).filter(day=day).count()
            return count if self.drop_day(alias, day) else 0
        except DatabaseError as error:
            if is_collision(error) or is_canceled(error) or sqlstate_of(error) == INSUFFICIENT_PRIVILEGE:
                return 0
            raise
