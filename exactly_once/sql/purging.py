"""Delete old rows in short transactions."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django.db.models import Model, QuerySet

from exactly_once.sql.now import DatabaseTime


def older_entries(trail: type[Model], alias: str, older_than: timedelta) -> QuerySet[Any]:
    """The entries of a trail that are older than `older_than`."""
    return QuerySet(trail, using=alias).filter(at__lt=DatabaseTime(-older_than))


def delete_in_chunks(rows: QuerySet[Any], *, by: str, chunk: int = 1000) -> Iterator[int]:
    """Delete the rows in the order of the field `by`, in small transactions; yield the number deleted in each."""
    while ids := list(rows.order_by(by).values_list("pk", flat=True)[:chunk]):
        # Without the rows that are deleted with them.
        yield rows.filter(pk__in=ids).delete()[1].get(rows.model._meta.label, 0)
