"""Names that are compared by their bytes, and columns whose every value can be read.

A collation of the operating system may order texts differently after an upgrade. PostgreSQL then searches an index of text in
the wrong place: it finds no receipt of a message that was handled, and inserts a second row where a unique index should refuse
it. The names in our indexes have the collation "C", which never changes: the columns have it, because a search does not use an
index of another collation than its column's. `db_collation` would not do, because SQLite does not know "C".

PostgreSQL and SQLite can store values that Python cannot represent: the instants `infinity` and `-infinity`, years before 1 and
after 9999, a number of ten thousand digits inside JSON. One such value, written by hand, would fail every query that returns
its row: a page of the admin, a claim, a report. A constraint of the tables refuses such an instant. Of such JSON the text is
read.

Migrations see the Django fields that these replace.
"""

from __future__ import annotations

from dataclasses import fields
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import models
from django.db.models import Func, Q

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.expressions import Combinable

    _CharField = models.CharField[str | Combinable, str]
else:
    _CharField = models.CharField

_Value = TypeVar("_Value")
_FIRST, _LAST = "0001-01-03 00:00:00", "9999-12-29 00:00:00"
"""Every instant between them exists in each time zone."""


class NameField(_CharField):
    """A `CharField` in an index, compared by its bytes. SQLite compares every text so."""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        parameters: Any = super().db_parameters(connection)
        return {**parameters, "collation": "C"} if connection.vendor == "postgresql" else parameters


class IsInstant(Func):
    """For a constraint: is this NULL, or an instant that Python can represent?"""

    template = f"(%(expressions)s BETWEEN '{_FIRST}+00' AND '{_LAST}+00')"
    output_field = models.BooleanField()

    def as_sqlite(self, compiler: Any, connection: Any, **more: Any) -> Any:
        within = f"julianday(%(expressions)s) BETWEEN julianday('{_FIRST}') AND julianday('{_LAST}')"
        return self.as_sql(compiler, connection, template=f"(%(expressions)s IS NULL OR COALESCE({within}, false))", **more)


def instants(name: str, *columns: str) -> models.CheckConstraint:
    """A constraint: these columns have only instants that Python can represent."""
    return models.CheckConstraint(name=name, condition=reduce(and_, [Q(IsInstant(column)) for column in columns]))


def bounds_instants(model: type[models.Model]) -> bool:
    """Does its table refuse some of the instants that Python can represent, in the first and the last year?"""
    return any(constraint.name.endswith("_instants") for constraint in model._meta.constraints)


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
