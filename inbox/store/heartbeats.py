"""Heartbeats of consumers; see `exactly_once.process.heartbeat`."""

from typing import Any

from django.db.models import QuerySet

from exactly_once.operators.heartbeat_table import HeartbeatTable
from exactly_once.process.heartbeat import FORGOTTEN_AFTER
from exactly_once.sql.now import DatabaseTime

consumers = HeartbeatTable("inbox")


def running_handlers(alias: str) -> set[str]:
    """The names of the handlers on a database that a process runs, according to the heartbeats."""
    return _handlers(consumers.rows(alias).filter(silent=False))


def lately_running_handlers(alias: str) -> set[str]:
    """The same, with those of processes that were killed within the last day or have stopped within the last hour."""
    return _handlers(consumers.known(alias).filter(beat_at__gte=DatabaseTime(-FORGOTTEN_AFTER)))


def _handlers(processes: QuerySet[Any]) -> set[str]:
    return {name for names in processes.values_list("facts__handlers", flat=True) for name in names}
