"""Values made from the rows of a model."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from django.db.models import Model

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
