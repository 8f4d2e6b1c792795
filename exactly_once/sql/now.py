"""The database's clock, which every process of a service shares. Instants that guarantees depend on come from it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import NotSupportedError
from django.db.models import DateTimeField, Func, Value

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.sql.compiler import SQLCompiler


class DatabaseTime(Func):
    """The database's clock at this statement, plus `after` (default: zero).

    PostgreSQL's `now()` is the start of the transaction, which may be long ago. Its `clock_timestamp()` differs for every row,
    so an index cannot be searched for it. `statement_timestamp()` has neither problem.
    """

    output_field = DateTimeField()
    arity = 1

    def __init__(self, after: timedelta = timedelta()) -> None:
        super().__init__(Value(after.total_seconds()))

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, *args: Any, **context: Any) -> Any:
        _refuse_unsupported(connection)

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        return super().as_sql(compiler, connection, template=_template("postgresql"), **context)

    def as_sqlite(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        return super().as_sql(compiler, connection, template=_template("sqlite"), **context)


NOW_AFTER = {
    "postgresql": "(statement_timestamp() + make_interval(secs => %s))",
    "sqlite": "STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'now', printf('%%+.6f seconds', %s))",
}
"""The same expression for SQL written by hand, by `connection.vendor`: one placeholder, seconds from now."""
NOW = {
    # Adding zero would cost PostgreSQL up to a tenth of the statement.
    "postgresql": "statement_timestamp()",
    "sqlite": NOW_AFTER["sqlite"].replace("%s", "0"),
}
"""The database's clock at this statement, by `connection.vendor`."""


def now_after(connection: BaseDatabaseWrapper) -> str:
    """`NOW_AFTER` for `connection`.

    Raises:
        NotSupportedError: the guarantees do not hold on this database.
    """
    _refuse_unsupported(connection)
    return NOW_AFTER[connection.vendor]


def now(connection: BaseDatabaseWrapper) -> str:
    """`NOW` for `connection`.

    Raises:
        NotSupportedError: see `now_after`.
    """
    _refuse_unsupported(connection)
    return NOW[connection.vendor]


def _refuse_unsupported(connection: BaseDatabaseWrapper) -> None:
    if connection.vendor not in NOW_AFTER:
        raise NotSupportedError(f"{connection.vendor} is not supported: use PostgreSQL, or SQLite to begin with.")


def _template(vendor: str) -> str:
    # A Func's template is formatted one more time than SQL written by hand.
    return NOW_AFTER[vendor].replace("%%", "%%%%").replace("%s", "%(expressions)s")
