"""Heartbeats: each process reports its status in its database, so that an operator sees which processes are alive.

Each process updates one row every few seconds, and marks it as stopped at an orderly end. Every instant comes from the
database's clock, so that hosts with different clocks can be compared. No guarantee depends on these rows: a missing row loses
no message, and a stale row blocks none.

With its heartbeat a process also reads the operator's request in its row, see `process.loop`.
"""

import os
import socket
import uuid
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from django.db import connections
from django.db.models import Q, QuerySet

from exactly_once.models import Process
from exactly_once.process import work
from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.process.loop import ALLOWED_IN, Mode, Request, StopRequest
from exactly_once.sql.deletions import delete_matching
from exactly_once.sql.faults import is_outage
from exactly_once.sql.now import DatabaseTime, now_after
from exactly_once.telemetry.statistics import Tally
from exactly_once.upkeep.minutes import MinuteWriter
from exactly_once.wire.text import NAME_LENGTH, describe, one_line

logger = escaping_logger(__name__)

_IS_STOPPING = Q(stopped_at=None, mode=Mode.STOPPING)
_ENDS = {Request.STOP, Request.DRAIN}
_PENDING = Q(acknowledged_at=None) & ~Q(requested="")
HEARTBEAT_SECONDS = 2.0
UNCHANGED_SECONDS = 5.0
"""Interval between two heartbeats with the same content."""
AFTER_FAILURE_SECONDS = 10.0
FORGET_SECONDS = 3600.0
FORGOTTEN_AFTER = timedelta(days=1)
STOPPED_SHOWN_FOR = timedelta(hours=1)
"""How long a process that has stopped in an orderly way is still shown."""
SILENT_AFTER = timedelta(seconds=15)
"""A process that has not written for this long is shown as silent: it was killed, is frozen or cannot reach its database."""
SILENCE_REPORTED_FOR = timedelta(hours=1)
"""How long a silent process is reported while others work. By then the broker has given its deliveries to them."""
REPLACED_WITHIN = timedelta(minutes=10)
"""Kubernetes starts the pods of a lost node elsewhere after six minutes."""
_VERSION_LENGTH = 32
_RATE_SECONDS = 10.0
"""A rate is an average over this time; the rate of an idle process falls to 0 within it."""
_STATM = Path("/proc/self/statm")


def _installed_version() -> str:
    try:
        return one_line(version("django-exactly-once"), _VERSION_LENGTH)
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """Identifies this process; readers take another instance for another process."""

    id: uuid.UUID = field(default_factory=uuid.uuid4)
    host: str = field(default_factory=lambda: one_line(socket.gethostname()))
    pid: int = field(default_factory=os.getpid)
    version: str = field(default_factory=_installed_version)


class Rate:
    """Messages per second, from a count that only grows.

    Args:
        now: when the count was 0 (monotonic).
    """

    def __init__(self, now: float) -> None:
        self._samples: deque[tuple[float, int]] = deque([(now, 0)])

    def of(self, now: float, count: int) -> float:
        """The rate of the last seconds; the first second is not extrapolated."""
        self._samples.append((now, count))
        while self._samples[1][0] <= now - _RATE_SECONDS:
            self._samples.popleft()
        since, before = self._samples[0]
        return round((count - before) / max(now - since, 1.0), 1)


class HeartbeatTable:
    """The processes of one app.

    Args:
        app: its package; "" for all apps. Only an app writes heartbeats.
    """

    def __init__(self, app: str = "") -> None:
        self.app = app

    def write(self, alias: str, identity: ProcessIdentity, *, running_for: timedelta, **columns: Any) -> Request | None:
        """Insert or update the row of this process with one statement, in autocommit; return the request that waits in it.

        A timedelta is written as the instant that long ago, by the database's clock.
        """
        connection, fields = connections[alias], Process._meta
        placeholders, parameters = [], []
        values = {**vars(identity), "app": self.app, "started_at": running_for, "beat_at": timedelta(), **columns}
        for name, value in values.items():
            placeholders.append(now_after(connection) if isinstance(value, timedelta) else "%s")
            field: Any = fields.get_field(name)
            parameters.append(
                -value.total_seconds() if isinstance(value, timedelta) else field.get_db_prep_save(value, connection)
            )
        rewritten = ", ".join(f"{name} = EXCLUDED.{name}" for name in ("beat_at", *columns))
        with connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {fields.db_table} ({', '.join(values)}) "  # noqa: S608 - our own names
                f"VALUES ({', '.join(placeholders)}) "
                f"ON CONFLICT (id) DO UPDATE SET {rewritten} RETURNING requested, acknowledged_at IS NULL",
                parameters,
            )
            requested, is_pending = cursor.fetchone()
        return Request(requested) if requested and is_pending else None

    def request(self, alias: str, process: uuid.UUID, request: Request, by: str) -> bool:
        """Leave a request in the row of a process. False: it has stopped, or the request has no effect in its mode."""
        running = self._rows(alias).filter(pk=process, stopped_at=None, mode__in=ALLOWED_IN[request])
        given = {"requested": request, "requested_by": by[:NAME_LENGTH], "requested_at": DatabaseTime()}
        return bool(running.update(**given, acknowledged_at=None))

    def pending(self, alias: str, process: uuid.UUID) -> Request | None:
        """The request that waits in the row of this process."""
        found = self._rows(alias).filter(_PENDING, pk=process).values_list("requested", flat=True).first()
        return Request(found) if found else None

    def acknowledge(self, alias: str, process: uuid.UUID, request: Request, mode: Mode) -> None:
        """Record that this process carries out the request, unless another one has replaced it."""
        pending = self._rows(alias).filter(_PENDING, pk=process, requested=request)
        pending.update(acknowledged_at=DatabaseTime(), mode=mode)

    def mark_stopped(self, alias: str, process: uuid.UUID, **columns: Any) -> None:
        """Record the orderly end of a process."""
        self._rows(alias).filter(pk=process).update(
            stopped_at=DatabaseTime(), rate=0.0, waits_for="", without_broker=False, **columns
        )

    def delete_old(self, alias: str, silent_for: timedelta) -> int:
        """Delete the rows of processes that have been silent for `silent_for`, or stopped an hour ago; return their number."""
        an_hour_ago = DatabaseTime(-STOPPED_SHOWN_FOR)
        stopped = Q(stopped_at__lt=an_hour_ago) | Q(_IS_STOPPING, beat_at__lt=an_hour_ago)
        return delete_matching(self._rows(alias).filter(Q(beat_at__lt=DatabaseTime(-silent_for)) | stopped))

    def rows(self, alias: str) -> QuerySet[Any]:
        """Every process that has not stopped, silent ones last, annotated with `silent` and with `database_now`."""
        return self.known(alias).filter(has_stopped=False)

    def known(self, alias: str) -> QuerySet[Any]:
        """`rows`, and after them the processes that have stopped within the last hour.

        One that was asked to stop and then fell silent has stopped, too: it did not end in time, and was killed.
        """
        an_hour_ago = DatabaseTime(-STOPPED_SHOWN_FOR)
        # A heartbeat from the future is that of a process which ended while the clock was ahead.
        late, early = DatabaseTime(-SILENT_AFTER), DatabaseTime(SILENT_AFTER)
        is_silent = Q(beat_at__lt=late) | Q(beat_at__gt=early)
        ended = Q(_IS_STOPPING, is_silent)
        old = Q(stopped_at__lt=an_hour_ago, stopped_at__isnull=False) | Q(_IS_STOPPING, beat_at__lt=an_hour_ago)
        known: QuerySet[Any] = self._rows(alias).annotate(
            has_stopped=Q(stopped_at__isnull=False) | ended,
            silent=Q(is_silent, stopped_at=None) & ~_IS_STOPPING,
            database_now=DatabaseTime(),
        )
        return known.exclude(old).order_by("has_stopped", "silent", "-app", "-started_at", "id")

    def _rows(self, alias: str) -> QuerySet[Process]:
        rows = Process.objects.using(alias)
        return rows.filter(app=self.app) if self.app else rows


class HeartbeatWriter:
    """Writes the row of this process in one database, and its statistics, and carries out the request in the row. Never raises.

    Used by one thread at a time, outside transactions.

    Args:
        table: of the app that the process works for.
        tally: what it counts for this database.
        stop: carries out the requests of operators.
        now: when it started (monotonic).
    """

    def __init__(
        self, table: HeartbeatTable, alias: str, identity: ProcessIdentity, tally: Tally, stop: StopRequest, now: float
    ) -> None:
        self._table = table
        self._alias = alias
        self._identity = identity
        self._minutes = MinuteWriter(table.app, alias, tally)
        self._stop = stop
        self._started_at = self._forget_at = now
        self._rate = Rate(now)
        self._database_seconds: float | None = None
        self._written: Mapping[str, Any] | None = None
        self._written_at = now
        self.is_failing = False
        """Could the last heartbeat not be written?"""

    def send(
        self,
        now: float,
        *,
        done: int,
        waits_for: str,
        without_broker: bool,
        facts: Mapping[str, Any],
        broker_seconds: float | None,
        passed_at: float | None = None,
    ) -> None:
        """Send one heartbeat: one statement, a read of the operator's request while nothing has changed for five seconds.

        Args:
            now: monotonic, as `passed_at`.
            done: messages since its start.
            facts: see the model.
        """
        changing = {
            "rate": self._rate.of(now, done),
            "waits_for": one_line(waits_for),
            "without_broker": without_broker,
            "mode": self._stop.mode,
            "facts": facts,
            "running": work.running(self._table.app, self._alias, self._started_at),
        }
        try:
            # On SQLite, each write takes the lock of the only writer.
            if changing == self._written and now < self._written_at + UNCHANGED_SECONDS:
                request = self._table.pending(self._alias, self._identity.id)
            else:
                passed = None if passed_at is None else timedelta(seconds=max(now - passed_at, 0))
                request = self._write(now, changing, broker_ms=milliseconds(broker_seconds), last_pass_at=passed)
            if request:
                self._obey(request)
        except Exception as error:  # noqa: BLE001 - no error of a heartbeat may stop the work
            self._failed(error)
        else:
            self.is_failing = False
            self._minutes.write_if_due()

    def close(self, **counts: int) -> None:
        """Write what is counted, and mark the row as stopped; not after a failed heartbeat: a silent row is deleted later.

        Args:
            counts: the final ones in the facts.
        """
        if self._written is None or self.is_failing:
            return
        self._minutes.write()
        try:
            facts = {**self._written["facts"], **counts}
            self._table.mark_stopped(self._alias, self._identity.id, facts=facts)
        except Exception as error:  # noqa: BLE001 - as above
            logger.debug("heartbeat: not marked as stopped in database %r: %s", self._alias, describe(error))

    def _write(self, now: float, changing: Mapping[str, Any], **columns: Any) -> Request | None:
        began_at = monotonic()
        request = self._table.write(
            self._alias,
            self._identity,
            running_for=timedelta(seconds=now - self._started_at),
            memory_bytes=resident_bytes(),
            database_ms=milliseconds(self._database_seconds),
            **columns,
            **changing,
        )
        self._database_seconds = monotonic() - began_at
        self._written, self._written_at = changing, now
        if now >= self._forget_at:
            self._forget_at = now + FORGET_SECONDS
            self._table.delete_old(self._alias, FORGOTTEN_AFTER)
        return request

    def _obey(self, request: Request) -> None:
        self._stop.obey(request)
        self._table.acknowledge(self._alias, self._identity.id, request, self._stop.mode)
        logger.warning("heartbeat: an operator requested: %s; this process is %s.", request, self._stop.mode)

    def _failed(self, error: Exception) -> None:
        connection = connections[self._alias]
        if is_outage(error) and not connection.in_atomic_block:
            connection.close()
        if not self.is_failing:
            logger.info(
                "heartbeat: not written to database %r (%s). The process continues; it may be shown as silent.",
                self._alias,
                describe(error),
            )
        self.is_failing = True


def lost(rows: Iterable[Any]) -> list[Any]:
    """Of `HeartbeatTable.rows`, the processes that fell silent lately and are neither replaced nor to be stopped.

    Only while others of them work: if none does, that is reported instead. A process replaces one that ran no other handlers.
    A supervisor starts a killed process again on its host, or soon elsewhere: each container has a host name of its own. One
    that starts elsewhere later may be one more.
    """
    known = list(rows)
    unused = sorted((row for row in known if not row.silent), key=lambda row: row.started_at)
    silent = [row for row in known if row.silent and unused and row.requested not in _ENDS]
    silent = [row for row in silent if row.beat_at >= row.database_now - SILENCE_REPORTED_FOR]
    silent.sort(key=lambda row: row.beat_at)
    for is_elsewhere in (False, True):
        for row in [*silent]:
            replacement = next((one for one in unused if _replaces(one, row, is_elsewhere=is_elsewhere)), None)
            if replacement is not None:
                unused.remove(replacement)
                silent.remove(row)
    return silent


def _replaces(one: Any, silent: Any, *, is_elsewhere: bool) -> bool:
    since = _last_known_at(silent)
    in_time = since < one.started_at and (not is_elsewhere or one.started_at < since + REPLACED_WITHIN)
    return in_time and (is_elsewhere or one.host == silent.host) and _handlers(silent) <= _handlers(one)


def is_ahead(row: Any) -> bool:
    """Is its last heartbeat from the future, so that it is not known when it was sent?"""
    return bool(row.beat_at > row.database_now)


def _handlers(row: Any) -> set[str]:
    return {*row.facts.get("handlers", ())}


def _last_known_at(row: Any) -> datetime:
    """The last instant at which this process is known to have worked; long ago if its clock was ahead from the start."""
    known: datetime = row.started_at if is_ahead(row) else row.beat_at
    return known if known <= row.database_now else row.database_now - FORGOTTEN_AFTER


def long_runs(row: Any, limit: timedelta) -> dict[str, list[timedelta]]:
    """For how long the runs of a process that take longer than `limit` have lasted, the longest first, by what runs."""
    found: dict[str, list[timedelta]] = {}
    for run in row.running:
        lasted = row.database_now - row.started_at - timedelta(seconds=run["began"])
        if lasted > limit:
            found.setdefault(run["what"], []).append(lasted)
    return found


def resident_bytes() -> int:
    """The resident memory of this process; without /proc, its peak."""
    with suppress(OSError, ValueError, IndexError):
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource  # noqa: PLC0415 - Windows has none, and imports this module, too

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 2)
