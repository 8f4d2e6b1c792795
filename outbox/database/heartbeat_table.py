"""The heartbeat rows of relays and consumers; see `kernel.heartbeat`."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

from django.db import connections
from django.db.models import BooleanField, ExpressionWrapper, Model, Q, QuerySet

from outbox.database.now import DatabaseTime, now_after
from outbox.kernel.heartbeat import SILENT_AFTER, ProcessIdentity


class HeartbeatTable:
    """The heartbeats of one kind of process.

    Args:
        model: has the fields of `ProcessIdentity`, `started_at` and `beat_at`, and the particular fields of its kind.
    """

    def __init__(self, model: type[Model]) -> None:
        self._model = model

    def write(self, alias: str, identity: ProcessIdentity, *, running_for: timedelta, **particular: Any) -> None:
        """Insert or update the row of this process with one statement, in autocommit.

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
                f"ON CONFLICT (id) DO UPDATE SET {rewritten}",
                parameters,
            )

    def delete(self, alias: str, process: uuid.UUID) -> None:
        """Delete the row of a process at its orderly end."""
        self._rows(alias).filter(pk=process).delete()

    def delete_silent(self, alias: str, older_than: timedelta) -> int:
        """Delete the rows of processes that have been silent for `older_than`; return their number."""
        return self._rows(alias).filter(beat_at__lt=DatabaseTime(-older_than)).delete()[0]

    def rows(self, alias: str) -> QuerySet[Any]:
        """Every known process, silent ones last, annotated with `silent` and with `database_now`, the time of the query."""
        silent = ExpressionWrapper(Q(beat_at__lt=DatabaseTime(-SILENT_AFTER)), output_field=BooleanField())
        annotated: QuerySet[Any] = self._rows(alias).annotate(silent=silent, database_now=DatabaseTime())
        return annotated.order_by("silent", "-started_at", "id")

    def _rows(self, alias: str) -> QuerySet[Any]:
        return QuerySet(self._model, using=alias)
