"""Time, in one place.

Instants that a promise rests on (due, expiry, retry) come from the database's clock, because every process of a service
shares it; `DatabaseTime` is that clock as an expression. Deadlines and durations inside one process are measured with
`monotonic`, which cannot be set and goes on while the machine is suspended, as the database, the broker and the leases do. What
this process itself has had time to do is measured with `awake`, which stands still meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import NotSupportedError
from django.db.models import DateTimeField, Func, Value

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.sql.compiler import SQLCompiler


def _boottime() -> Callable[[], float] | None:
    """Linux's clock that counts the time in suspension, too (clock_gettime(2)); None where there is none."""
    try:
        clock = time.CLOCK_BOOTTIME
        time.clock_gettime(clock)
    except (AttributeError, OSError):
        return None
    return partial(time.clock_gettime, clock)


monotonic = _boottime() or time.monotonic
awake = time.monotonic


def utcnow() -> datetime:
    """This process's wall clock, aware, in UTC. Nothing that must be exact may rest on it."""
    return datetime.now(tz=UTC)


class DatabaseTime(Func):
    """The database's own clock at this very statement, `after` from now (default: now).

    PostgreSQL's `now()` is the start of the transaction, which a long transaction leaves far behind, and its
    `clock_timestamp()` is a new instant at every row, which no index can be asked for; `statement_timestamp()` is neither.
    """

    output_field = DateTimeField()
    arity = 1

    def __init__(self, after: timedelta = timedelta()) -> None:
        super().__init__(Value(after.total_seconds()))

    def as_sql(
        self,
        compiler: SQLCompiler,
        connection: BaseDatabaseWrapper,
        function: str | None = None,
        template: str | None = None,
        arg_joiner: str | None = None,
        **extra_context: Any,
    ) -> Any:
        raise NotSupportedError(f"{connection.vendor} is not supported: use PostgreSQL, or SQLite to begin with.")

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        return super().as_sql(compiler, connection, template=_template("postgresql"), **context)

    def as_sqlite(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        return super().as_sql(compiler, connection, template=_template("sqlite"), **context)


NOW_AFTER = {
    "postgresql": "(statement_timestamp() + make_interval(secs => %s))",
    "sqlite": "STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%+.6f seconds', %s))",
}
"""The same expression for SQL written by hand, by `connection.vendor`: one placeholder, seconds from now."""


def now_after(connection: BaseDatabaseWrapper) -> str:
    """`NOW_AFTER` for `connection`.

    Raises:
        NotSupportedError: no promise can be kept on this database.
    """
    if connection.vendor not in NOW_AFTER:
        raise NotSupportedError(f"{connection.vendor} is not supported: use PostgreSQL, or SQLite to begin with.")
    return NOW_AFTER[connection.vendor]


def _template(vendor: str) -> str:
    # A Func's template is formatted once more than SQL written by hand.
    return NOW_AFTER[vendor].replace("%%", "%%%%").replace("%s", "%(expressions)s")
