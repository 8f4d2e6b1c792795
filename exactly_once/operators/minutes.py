"""The statistics of each minute, which the processes of an app write: rows of a process, one for each subject and one for all.

Rows are only inserted. A process that writes twice in a minute has two rows for it, and a reader adds them. They are written in
a transaction of their own, once a minute while there is something to write. Every half hour a process that has counted nothing
writes an empty row, which distinguishes zero from unknown. A failed write is tried again later and affects only the display: no
guarantee depends on these rows.

Counting the messages themselves takes seconds for millions of rows, and history may be dropped. `pg_stat_user_tables` knows
tables, not topics. One row per minute for all processes would make them wait for each other, and leave a dead row per update.
Prometheus is supported too, but the pages of the admin work without it.

The ideas of counting are described in `telemetry.statistics`.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from django.db import connections, models
from django.db.models import F, QuerySet, Sum

from exactly_once.process.clock import monotonic, utcnow
from exactly_once.process.heartbeat import one_line
from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.now import DatabaseTime, now
from exactly_once.sql.purging import delete_in_chunks
from exactly_once.telemetry.statistics import ALL, OTHER, Counted, Tally, total
from exactly_once.wire.text import NAME_LENGTH, describe

logger = logging.getLogger(__name__)

MINUTE = timedelta(minutes=1)
KEPT = timedelta(days=8)
_AFTER_THE_MINUTE = timedelta(seconds=2)
_LATE = timedelta(seconds=10)
"""What is written within this time after a minute belongs to that minute: heartbeats are a few seconds apart."""
_AFTER_FAILURE_SECONDS = 30.0
_EMPTY_SECONDS = 1800.0
_PURGE_SECONDS = 3600.0
_MOST_CHUNKS = 20
_READ_AT_ONCE = 2_000


class MinuteRow(models.Model):
    """What one process counted in one minute of one subject.

    A subclass has an integer field for each name in `counted`, and a JSON field for each in `timed`, a histogram.
    """

    counted: ClassVar[Sequence[str]]
    timed: ClassVar[Sequence[str]]

    id = models.BigAutoField(primary_key=True)
    minute = models.DateTimeField()
    process = models.CharField(max_length=NAME_LENGTH)
    subject = models.CharField(max_length=NAME_LENGTH)

    class Meta:
        abstract = True
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.subject} in {self.minute:%Y-%m-%d %H:%M}"


def minute_indexes(app: str) -> tuple[models.Index, ...]:
    """The indexes of a subclass of `MinuteRow`, named after its package: a project may change the label, but not migrations."""
    return (
        models.Index(fields=["subject", "minute"], name=f"{app}_minute_subject"),
        models.Index(fields=["minute"], name=f"{app}_minute"),
    )


def database_time(alias: str) -> datetime:
    """The time by the database's clock."""
    connection = connections[alias]
    if not is_postgresql(connection):
        return utcnow()  # SQLite has the clock of this machine
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {now(connection)}")
        found: datetime = cursor.fetchone()[0]
    return found.astimezone(UTC)


class MinuteWriter:
    """Writes what a process counts for one database. Used by one thread. It never raises.

    Inside a transaction, as in a test, it writes nothing.
    """

    def __init__(self, model: type[MinuteRow], alias: str, tally: Tally) -> None:
        self._model = model
        self._alias = alias
        self._tally = tally
        self._process = one_line(f"{socket.gethostname()}:{os.getpid()}")
        self._due_at = self._purge_at = self._empty_at = monotonic()

    def write_if_due(self) -> None:
        """Write if the last row is of an earlier minute. It usually only reads the clock."""
        now = monotonic()
        if now >= self._due_at and (now >= self._empty_at or not self._tally.is_empty):
            self.write()

    def write(self) -> None:
        """Write what was counted, and compare the clocks."""
        if connections[self._alias].in_atomic_block:
            return
        taken: Mapping[str, Counted] = {}
        try:
            at = database_time(self._alias)
            self._tally.ahead = at - utcnow()
            taken = self._tally.take()
            if taken or monotonic() >= self._empty_at:
                self._insert(at, taken)
                self._empty_at = monotonic() + _EMPTY_SECONDS
            self._purge()
        except Exception as error:  # noqa: BLE001 - whatever it is, the work goes on
            self._tally.put_back(taken)
            self._due_at = monotonic() + _AFTER_FAILURE_SECONDS
            logger.debug("Statistics were not written to %r: %s", self._alias, describe(error))
            return
        if taken:
            self._due_at = monotonic() + (_beginning(at) + MINUTE + _AFTER_THE_MINUTE - at).total_seconds()

    def _insert(self, at: datetime, taken: Mapping[str, Counted]) -> None:
        minute = _beginning(at - _LATE)
        subjects = {**taken, ALL: total(taken.values())}
        _rows(self._model, self._alias).bulk_create(
            self._model(
                minute=minute,
                process=self._process,
                subject=subject,
                **counted.counts,
                **counted.times,
            )
            for subject, counted in subjects.items()
        )

    def _purge(self) -> None:
        if monotonic() < self._purge_at:
            return
        self._purge_at = monotonic() + _PURGE_SECONDS
        old = _rows(self._model, self._alias).filter(minute__lt=DatabaseTime(-KEPT))
        for number, _ in enumerate(delete_in_chunks(old, by="minute"), 1):
            if number == _MOST_CHUNKS:
                break


def _rows(model: type[MinuteRow], alias: str) -> QuerySet[Any]:
    return QuerySet(model, using=alias)


def _beginning(instant: datetime, step: timedelta = MINUTE) -> datetime:
    """The beginning of the `step` that the instant is in."""
    seconds = int(instant.timestamp()) // int(step.total_seconds()) * int(step.total_seconds())
    return datetime.fromtimestamp(seconds, tz=UTC)


@dataclass(frozen=True)
class Step:
    """What all processes counted in one step of time, from `at` on."""

    at: datetime
    counted: Counted


@dataclass(frozen=True)
class Failing:
    """A subject with failures. `subject` is `OTHER` for the sum of those that are not counted one by one."""

    subject: str
    failed: int


class Minutes:
    """Reads the statistics of one app."""

    def __init__(self, model: type[MinuteRow]) -> None:
        self._model = model

    def steps(self, alias: str, duration: timedelta, step: timedelta = MINUTE, *, timed: Sequence[str] = ()) -> list[Step]:
        """What was counted in each step of the time until now, the oldest first, with the durations of the names in `timed`.

        The present step, which is not over, is left out. A step in which nothing was counted has no counts.
        """
        end = _beginning(database_time(alias), step)
        begin = end - duration
        found: defaultdict[datetime, Counted] = defaultdict(Counted)
        for at, *values in self._of_all(alias, begin, end, timed):
            self._add(found[_beginning(at, step)], values, timed)
        instants = (begin + number * step for number in range(duration // step))
        return [Step(at, found[at]) for at in instants]

    def sum(self, alias: str, duration: timedelta) -> Counted:
        """What was counted in this time until now, the present minute included."""
        end = database_time(alias) + MINUTE
        found = Counted()
        timed = self._model.timed
        for _, *values in self._of_all(alias, end - MINUTE - duration, end, timed):
            self._add(found, values, timed)
        return found

    def counts(self, alias: str, duration: timedelta) -> Counted:
        """The same without durations, which the database adds up."""
        rows = _rows(self._model, alias).filter(subject=ALL, minute__gte=DatabaseTime(-duration))
        summed = rows.aggregate(**{f"sum_{name}": Sum(name, default=0) for name in self._model.counted})
        return Counted(Counter({name: summed[f"sum_{name}"] for name in self._model.counted}))

    def is_kept(self, alias: str) -> bool:
        """Has any process written statistics within the last day?"""
        rows = _rows(self._model, alias)
        return rows.filter(subject=ALL, minute__gte=DatabaseTime(-timedelta(days=1))).exists()

    def failing(self, alias: str, duration: timedelta, names: Sequence[str], most: int) -> list[Failing]:
        """The subjects with the most failures, the worst first.

        Args:
            names: the counts that are failures.
        """
        rows = _rows(self._model, alias).filter(minute__gte=DatabaseTime(-duration)).exclude(subject=ALL)
        failed = sum((F(name) for name in names[1:]), start=F(names[0]))
        summed = rows.values_list("subject").annotate(failed=Sum(failed)).filter(failed__gt=0)
        return [Failing(subject, count) for subject, count in summed.order_by("-failed", "subject")[:most]]

    def by_subject(self, alias: str, duration: timedelta) -> dict[str, Counted]:
        """The durations that were counted of each subject in this time until now."""
        rows = _rows(self._model, alias).filter(minute__gte=DatabaseTime(-duration)).exclude(subject=ALL)
        found: defaultdict[str, Counted] = defaultdict(Counted)
        timed = self._model.timed
        for subject, *histograms in rows.values_list("subject", *timed).iterator(chunk_size=_READ_AT_ONCE):
            _add_durations(found[subject], histograms, timed)
        return found

    def _of_all(self, alias: str, begin: datetime, end: datetime, timed: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        rows = _rows(self._model, alias).filter(subject=ALL, minute__gte=begin, minute__lt=end)
        return iter(rows.values_list("minute", *self._model.counted, *timed))

    def _add(self, found: Counted, values: Sequence[Any], timed: Sequence[str]) -> None:
        """Add the values of a row."""
        names = self._model.counted
        for name, number in zip(names, values, strict=False):
            found.counts[name] += number
        _add_durations(found, values[len(names) :], timed)


def _add_durations(found: Counted, histograms: Sequence[Mapping[str, int]], timed: Sequence[str]) -> None:
    """Add histograms with these names. A key of a JSON object is text."""
    for name, histogram in zip(timed, histograms, strict=True):
        added = found.times.setdefault(name, Counter())
        for bucket, number in histogram.items():
            added[int(bucket)] += number


__all__ = ["ALL", "KEPT", "MINUTE", "OTHER", "Failing", "MinuteRow", "MinuteWriter", "Minutes", "Step", "database_time"]
