"""The heartbeat rows of relays and consumers; see `process.heartbeat`."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import connections
from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet
from django.utils.functional import Promise

from exactly_once.operators.process_model import ProcessHeartbeat
from exactly_once.process.heartbeat import SILENT_AFTER, STOPPED_SHOWN_FOR, ProcessIdentity
from exactly_once.process.requests import ALLOWED_IN, Mode, Request
from exactly_once.sql.now import DatabaseTime, now_after
from exactly_once.wire.text import NAME_LENGTH

_PENDING = Q(acknowledged_at=None) & ~Q(requested="")


class HeartbeatTable:
    """The heartbeats of one kind of process.

    Args:
        model: has the particular fields of its kind, too.
    """

    def __init__(self, model: type[ProcessHeartbeat]) -> None:
        self._model = model

    def write(self, alias: str, identity: ProcessIdentity, *, running_for: timedelta, **particular: Any) -> Request | None:
        """Insert or update the row of this process with one statement, in autocommit; return the request that waits in it.

        A timedelta is written as the instant that long ago, by the database's clock.
        """
        connection, fields = connections[alias], self._model._meta
        placeholders, parameters = [], []
        values = {**vars(identity), "started_at": running_for, "beat_at": timedelta(), **particular}
        for name, value in values.items():
            placeholders.append(now_after(connection) if isinstance(value, timedelta) else "%s")
            field: Any = fields.get_field(name)
            parameters.append(
                -value.total_seconds() if isinstance(value, timedelta) else field.get_db_prep_save(value, connection)
            )
        rewritten = ", ".join(f"{name} = EXCLUDED.{name}" for name in ("beat_at", *particular))
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

    def mark_stopped(self, alias: str, process: uuid.UUID) -> None:
        """Record the orderly end of a process."""
        self._rows(alias).filter(pk=process).update(stopped_at=DatabaseTime(), rate=0.0, waits_for="")

    def delete_old(self, alias: str, silent_for: timedelta) -> int:
        """Delete the rows of processes that have been silent for `silent_for`, or stopped an hour ago; return their number."""
        stopped = Q(stopped_at__lt=DatabaseTime(-STOPPED_SHOWN_FOR))
        return self._rows(alias).filter(Q(beat_at__lt=DatabaseTime(-silent_for)) | stopped).delete()[0]

    def rows(self, alias: str) -> QuerySet[Any]:
        """Every process that has not stopped, silent ones last, annotated with `silent` and with `database_now`."""
        running: QuerySet[Any] = self._annotated(alias).filter(stopped_at=None)
        return running.order_by("silent", "-started_at", "id")

    def known(self, alias: str) -> QuerySet[Any]:
        """`rows`, and after them the processes that have stopped within the last hour."""
        lately = Q(stopped_at=None) | Q(stopped_at__gte=DatabaseTime(-STOPPED_SHOWN_FOR))
        has_stopped = ExpressionWrapper(Q(stopped_at__isnull=False), output_field=BooleanField())
        found: QuerySet[Any] = self._annotated(alias).filter(lately).annotate(has_stopped=has_stopped)
        return found.order_by("has_stopped", "silent", "-started_at", "id")

    def _annotated(self, alias: str) -> QuerySet[Any]:
        is_silent = Q(stopped_at=None, beat_at__lt=DatabaseTime(-SILENT_AFTER))
        silent = ExpressionWrapper(is_silent, output_field=BooleanField())
        annotated: QuerySet[Any] = self._rows(alias).annotate(silent=silent, database_now=DatabaseTime())
        return annotated

    def _rows(self, alias: str) -> QuerySet[Any]:
        return QuerySet(self._model, using=alias)


@dataclass(frozen=True, kw_only=True)
class ProcessKind:
    """A kind of process.

    Attributes:
        app: the package that it belongs to.
        name: "relay", for people.
        heartbeats: its table.
    """

    app: str
    name: str | Promise
    heartbeats: HeartbeatTable


_kinds: dict[str, ProcessKind] = {}


def register_process_kind(kind: ProcessKind) -> None:
    """Register a kind of process, when Django is ready. A second call for an app replaces the first."""
    _kinds[kind.app] = kind


def process_kinds() -> list[ProcessKind]:
    """The registered kinds, in the order of the apps in INSTALLED_APPS."""
    return list(_kinds.values())
