"""Days by the database's clock, as numbers: days since 1970-01-01 UTC. History is partitioned by them."""

from __future__ import annotations

from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models import Func, IntegerField

from exactly_once.sql.connections import fetch
from exactly_once.sql.now import NOW, now_after

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.sql.compiler import SQLCompiler

LIVE = 0
"""The `day` of a message that is not settled."""

FIRST_DAY = LIVE + 1
"""The first `day` of history. The planners of PostgreSQL and SQLite exclude live rows for `day >= 1`, but not for `day > 0`."""

_DAY = {
    "postgresql": "CAST(floor(EXTRACT(EPOCH FROM {}) / 86400) AS int)",
    "sqlite": "CAST(julianday({}) - 2440587.5 AS int)",
}
"""The day of an instant, by `connection.vendor`."""
DAY_OF_NOW = {"postgresql": _DAY["postgresql"].format(NOW["postgresql"]), "sqlite": _DAY["sqlite"].format("'now'")}
"""The present day, by `connection.vendor`."""
_EPOCH = date(1970, 1, 1)


class Today(Func):
    """The present day by the database's clock."""

    output_field = IntegerField()
    arity = 0

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        return DAY_OF_NOW["postgresql"], []

    def as_sqlite(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        return DAY_OF_NOW["sqlite"], []


def day_of(alias: str, ago: timedelta = timedelta()) -> int:
    """The present day by the database's clock, or the day `ago` before now."""
    connection = connections[alias]
    day = _DAY[connection.vendor].format(now_after(connection))
    return int(fetch(connection, f"SELECT {day}", [-ago.total_seconds()])[0][0])


def last_day(alias: str, kept: timedelta) -> int:
    """The last day that is older than `kept` from beginning to end."""
    return day_of(alias, kept) - 1


def date_of(day: int) -> date:
    return _EPOCH + timedelta(days=day)


def number_of(day: date) -> int:
    return (day - _EPOCH).days
