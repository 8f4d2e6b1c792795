"""Values made from the rows of a model, and the deletion of old rows in short transactions."""

from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from typing import Any, TypeVar

from django.db.models import Model, QuerySet

from exactly_once.sql.now import DatabaseTime

_Value = TypeVar("_Value")


def value_of(kind: type[_Value], row: Model, **given: Any) -> _Value:
    """A dataclass of `kind` with the columns of `row` that have the names of its fields.

    Args:
        given: the fields that are not columns of the row, or have other values.

    Raises:
        AttributeError: a field is neither given nor a column.
    """
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type] # every kind is a dataclass
    return kind(**{name: given[name] if name in given else getattr(row, name) for name in names})


def older_entries(trail: type[Model], alias: str, older_than: timedelta) -> QuerySet[Any]:
    """The entries of a trail that are older than `older_than`."""
    return QuerySet(trail, using=alias).filter(at__lt=DatabaseTime(-older_than))


def delete_in_chunks(rows: QuerySet[Any], *, by: str, chunk: int = 1000) -> Iterator[int]:
    """Delete the rows in the order of the field `by`, in small transactions; yield the number deleted in each."""
    while ids := list(rows.order_by(by).values_list("pk", flat=True)[:chunk]):
        # Without the rows that are deleted with them.
        yield rows.filter(pk__in=ids).delete()[1].get(rows.model._meta.label, 0)
