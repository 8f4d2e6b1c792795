"""The statistics of each minute, which the processes write: rows of a process, one for each subject and one for all.

Rows are only inserted. A process that writes twice in a minute has two rows for it, and a reader adds them. They are written in
a transaction of their own, once a minute while there is something to write. Every half hour a process that has counted nothing
writes an empty row, which distinguishes zero from unknown. A failed write is tried again later and affects only the display: no
guarantee depends on these rows.

Counting the messages themselves takes seconds for millions of rows, and history may be dropped. `pg_stat_user_tables` knows
tables, not topics. One row per minute for all processes would make them wait for each other, and leave a dead row per update.
Prometheus is supported too, but the pages of the admin work without it.

The ideas of counting are described in `telemetry.statistics`.
"""

import os
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import connections
from django.db.models import QuerySet

from exactly_once.models import Minute
from exactly_once.process.clock import monotonic, utcnow
from exactly_once.process.logs import escaping_logger
from exactly_once.sql.connections import fetch, is_postgresql
from exactly_once.sql.now import DatabaseTime, now, now_after
from exactly_once.telemetry.statistics import ALL, OTHER, Counted, Tally, total
from exactly_once.upkeep.housekeeping import delete_in_chunks
from exactly_once.wire.text import describe, one_line

logger = escaping_logger(__name__)

MINUTE = timedelta(minutes=1)
LATELY = timedelta(minutes=10)
_FEWEST_ATTEMPTS = 10
KEPT = timedelta(days=8)
_AFTER_THE_MINUTE = timedelta(seconds=2)
_LATE = timedelta(seconds=10)
"""What is written within this time after a minute belongs to that minute: heartbeats are a few seconds apart."""
_AFTER_FAILURE_SECONDS = 30.0
_EMPTY_SECONDS = 1800.0
_PURGE_SECONDS = 3600.0
_MOST_CHUNKS = 20
_READ_AT_ONCE = 2_000


def database_time(alias: str) -> datetime:
    """The time by the database's clock."""
    connection = connections[alias]
    if not is_postgresql(connection):
        return utcnow()  # SQLite has the clock of this machine
    found: datetime = fetch(connection, f"SELECT {now(connection)}")[0][0]
    return found.astimezone(UTC)


class MinuteWriter:
    """Writes what a process counts for one database. Used by one thread. It never raises.

    Inside a transaction, as in a test, it writes nothing.
    """

    def __init__(self, app: str, alias: str, tally: Tally) -> None:
        self._app = app
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
        Minute.objects.using(self._alias).bulk_create(
            Minute(app=self._app, minute=minute, process=self._process, subject=subject, **vars(counted))
            for subject, counted in subjects.items()
        )

    def _purge(self) -> None:
        if monotonic() < self._purge_at:
            return
        self._purge_at = monotonic() + _PURGE_SECONDS
        old = Minute.objects.using(self._alias).filter(minute__lt=DatabaseTime(-KEPT))
        for number, _ in enumerate(delete_in_chunks(old, by="minute"), 1):
            if number == _MOST_CHUNKS:
                break


def _beginning(instant: datetime, step: timedelta = MINUTE) -> datetime:
    """The beginning of the `step` that the instant is in."""
    seconds = int(instant.timestamp()) // int(step.total_seconds()) * int(step.total_seconds())
    return datetime.fromtimestamp(seconds, tz=UTC)


@dataclass(frozen=True)
class Step:
    """What all processes counted in one step of time, from `at` on."""

    at: datetime
    counted: Counted


class Minutes:
    """Reads the statistics of one app.

    Args:
        app: its package.
    """

    def __init__(self, app: str) -> None:
        self._app = app

    def steps(self, alias: str, duration: timedelta, step: timedelta = MINUTE, *, timed: Sequence[str] = ()) -> list[Step]:
        """What was counted in each step of the time until now, the oldest first, with the durations of the names in `timed`.

        The present step, which is not over, is left out. A step in which nothing was counted has no counts.
        """
        end = _beginning(database_time(alias), step)
        begin = end - duration
        found: defaultdict[datetime, Counted] = defaultdict(Counted)
        columns = [f"times__{name}" for name in timed]
        for at, counts, *histograms in self._of_all(alias, begin, end).values_list("minute", "counts", *columns):
            found[_beginning(at, step)].add(_counted(counts, dict(zip(timed, histograms, strict=True))))
        instants = (begin + number * step for number in range(duration // step))
        return [Step(at, found[at]) for at in instants]

    def sum(self, alias: str, duration: timedelta) -> Counted:
        """What was counted in this time until now, the present minute included."""
        end = database_time(alias) + MINUTE
        rows = self._of_all(alias, end - MINUTE - duration, end).values_list("counts", "times")
        return total(_counted(counts, times) for counts, times in rows)

    def counts(self, alias: str, duration: timedelta) -> Counted:
        """The same without durations, which the database adds up."""
        return Counted(Counter(self._summed(alias, duration, "counted.key", "subject = %s", [ALL])))

    def is_kept(self, alias: str) -> bool:
        """Has any process written statistics within the last day?"""
        return self._rows(alias).filter(subject=ALL, minute__gte=DatabaseTime(-timedelta(days=1))).exists()

    def failing(self, alias: str, duration: timedelta, names: Sequence[str], most: int) -> list[tuple[str, int]]:
        """The subjects with the most failures and their numbers, the worst first; `OTHER` for those not counted one by one.

        Args:
            names: the counts that are failures.
        """
        condition = f"subject <> %s AND counted.key IN ({', '.join(['%s'] * len(names))})"
        failed = self._summed(alias, duration, "subject", condition, [ALL, *names])
        return [(subject, count) for subject, count in failed.items() if count][:most]

    def failing_lately(self, alias: str, succeeded: str, failed: Sequence[str]) -> dict[str, tuple[int, int]]:
        """The subjects of whose attempts in the last ten minutes at least half have failed: how many failed, and of how many.

        Args:
            succeeded, failed: the names of the counts.
        """
        found = {}
        for subject, counted in self.by_subject(alias, LATELY).items():
            failures = sum(counted.counts[name] for name in failed)
            attempts = failures + counted.counts[succeeded]
            if subject != OTHER and attempts >= _FEWEST_ATTEMPTS and 2 * failures >= attempts:
                found[subject] = failures, attempts
        return found

    def by_subject(self, alias: str, duration: timedelta) -> dict[str, Counted]:
        """What was counted of each subject in this time until now."""
        rows = self._rows(alias).filter(minute__gte=DatabaseTime(-duration)).exclude(subject=ALL)
        found: defaultdict[str, Counted] = defaultdict(Counted)
        for subject, counts, times in rows.values_list("subject", "counts", "times").iterator(chunk_size=_READ_AT_ONCE):
            found[subject].add(_counted(counts, times))
        return found

    def _of_all(self, alias: str, begin: datetime, end: datetime) -> QuerySet[Minute]:
        return self._rows(alias).filter(subject=ALL, minute__gte=begin, minute__lt=end)

    def _rows(self, alias: str) -> QuerySet[Minute]:
        return Minute.objects.using(alias).filter(app=self._app)

    def _summed(self, alias: str, duration: timedelta, group: str, condition: str, given: Sequence[str]) -> dict[str, int]:
        """The sums of counts within this time, the largest first."""
        connection = connections[alias]
        counts = "jsonb_each_text(counts)" if is_postgresql(connection) else "json_each(counts)"
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT {group}, SUM(CAST(counted.value AS bigint)) FROM {Minute._meta.db_table}, {counts} AS counted "  # noqa: S608
                f"WHERE app = %s AND minute >= {now_after(connection)} AND {condition} GROUP BY 1 ORDER BY 2 DESC, 1",
                [self._app, -duration.total_seconds(), *given],
            )
            return {name: int(summed) for name, summed in cursor.fetchall()}


def _counted(counts: Mapping[str, int], times: Mapping[str, Mapping[str, int] | None]) -> Counted:
    """What a row has. A key of a JSON object is text."""
    histograms = {name: {int(bucket): number for bucket, number in (found or {}).items()} for name, found in times.items()}
    return Counted(Counter(counts), {name: Counter(histogram) for name, histogram in histograms.items()})


__all__ = ["ALL", "KEPT", "LATELY", "MINUTE", "OTHER", "MinuteWriter", "Minutes", "Step", "database_time"]
