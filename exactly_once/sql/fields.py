"""Fields that compare names by their bytes, and fields that can read any value of their columns.

A collation of the operating system may order texts differently after an upgrade. PostgreSQL then searches an index of text in
the wrong place: it finds no receipt of a message that was handled, and inserts a second row where a unique index should refuse
it. The names in our indexes have the collation "C", which never changes: the columns have it, because a search does not use an
index of another collation than its column's. `db_collation` would not do, because SQLite does not know "C".

PostgreSQL and SQLite can store values that Python cannot represent: the instants `infinity` and `-infinity`, years before 1 and
after 9999, a number of ten thousand digits inside JSON. One such value, written by hand, would fail every query that returns
its row: a page of the admin, a claim, a report. The other fields replace such a value on reading and leave it in the table.

Migrations see the Django fields that these replace.
"""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import models

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.expressions import Combinable
    from django.db.models.sql.compiler import SQLCompiler

    _CharField = models.CharField[str | Combinable, str]
else:
    _CharField = models.CharField

_Value = TypeVar("_Value")
FIRST_INSTANT, LAST_INSTANT = datetime(1, 1, 3, tzinfo=UTC), datetime(9999, 12, 29, tzinfo=UTC)
"""Every instant between them exists in each time zone."""
_FIRST, _LAST = FIRST_INSTANT.strftime("0001-%m-%d %H:%M:%S"), LAST_INSTANT.strftime("%Y-%m-%d %H:%M:%S")

_CLAMPED = {
    # GREATEST and LEAST would turn NULL into an instant.
    "postgresql": (
        f"CASE WHEN {{0}} > '{_LAST}+00'::timestamptz THEN '{_LAST}+00'::timestamptz "
        f"WHEN {{0}} < '{_FIRST}+00'::timestamptz THEN '{_FIRST}+00'::timestamptz ELSE {{0}} END"
    ),
    # SQLite stores any text. It is shortened before the comparison, because SQLite rounds to milliseconds.
    "sqlite": (
        f"CASE WHEN {{0}} IS NULL THEN NULL WHEN {{0}} < '{_FIRST}' THEN '{_FIRST}' "
        f"WHEN {{0}} < '{_LAST}' AND julianday({{0}}) IS NOT NULL "
        "AND strftime('%%Y-%%m-%%d %%H:%%M:%%S', substr({0}, 1, 19)) = substr({0}, 1, 19) THEN {0} "
        f"ELSE '{_LAST}' END"
    ),
}
_REPEATED = {vendor: clamped.count("{0}") for vendor, clamped in _CLAMPED.items()}


class NameField(_CharField):
    """A `CharField` in an index, compared by its bytes. SQLite compares every text so."""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        parameters: Any = super().db_parameters(connection)
        return {**parameters, "collation": "C"} if connection.vendor == "postgresql" else parameters


class InstantField(models.DateTimeField):  # type: ignore[type-arg]
    """A `DateTimeField` that reads an instant that Python cannot represent as the first or the last one."""

    def deconstruct(self) -> Any:
        return _as_djangos(super().deconstruct(), "DateTimeField")

    def select_format(self, compiler: SQLCompiler, sql: str, params: Any) -> tuple[str, Any]:
        connection: BaseDatabaseWrapper = compiler.connection
        clamped = _CLAMPED.get(connection.vendor)
        if clamped is None:
            return sql, params
        return clamped.format(sql), [*params] * _REPEATED[connection.vendor]


class ReadableJSONField(models.JSONField):
    """A `JSONField` that returns a value that Python cannot decode as text."""

    def deconstruct(self) -> Any:
        return _as_djangos(super().deconstruct(), "JSONField")

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        try:
            return super().from_db_value(value, expression, connection)
        except (ValueError, RecursionError):
            return value


def _as_djangos(deconstructed: Any, field: str) -> Any:
    name, _, args, kwargs = deconstructed
    return name, f"django.db.models.{field}", args, kwargs


def value_of(kind: type[_Value], row: models.Model, **given: Any) -> _Value:
    """A dataclass of `kind` with the columns of `row` that have the names of its fields.

    Args:
        given: the fields that are not columns of the row, or have other values.

    Raises:
        AttributeError: a field is neither given nor a column.
    """
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type] # every kind is a dataclass
    return kind(**{name: given[name] if name in given else getattr(row, name) for name in names})
