"""Finding rows of a partitioned table, see `partitions`, without reading all of history.

On PostgreSQL a statement that does not say on which days its rows are locks the partition of each day, and all its indexes.
With 400 days, two such statements at once exhaust the lock table. So a statement names its days, as numbers in its text,
because PostgreSQL leaves partitions out only when it plans. Where a row is must be found first: among its likely days, then on
all others, a few at a time, without keeping their locks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction

from exactly_once.process.clock import utcnow
from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.days import FIRST_DAY, LIVE, number_of
from exactly_once.sql.partitions import existing_days

if TYPE_CHECKING:
    from datetime import datetime

    from django.db.models import QuerySet

_AT_ONCE = 16
_LAST_DAY = 2**31 - 1


def lately() -> tuple[int, ...]:
    """The days of rows that are open, or were settled today or yesterday by this clock."""
    today = number_of(utcnow().date())
    return LIVE, today - 1, today


def soon_after(instant: datetime) -> tuple[int, ...]:
    """The days of rows of this instant that are open, or were settled then or on the next day."""
    day = number_of(instant.date())
    return LIVE, day, day + 1


def days_by(rows: QuerySet[Any], field: str, values: Collection[Any], likely: Collection[int] = ()) -> dict[Any, int]:
    """By the value of a unique field, the day of each of these rows that exists.

    Args:
        rows: all rows of the table.
        likely: their probable days.
    """
    rows = rows.order_by()
    if not is_postgresql(connections[rows.db]):
        return dict(rows.filter(**{f"{field}__in": values}).values_list(field, "day"))
    found: dict[Any, int] = {}
    missing = list(values)
    first = sorted({LIVE, *likely})[: 2 * _AT_ONCE]
    # The open ones again at the end: a row that is made open meanwhile leaves a day that was not read for one that was.
    for days in chain([{"day__in": first}], windows(rows), [{"day": LIVE}]):
        found.update(_without_locks(rows.filter(**{f"{field}__in": missing}, **days).values_list(field, "day")))
        if not (missing := [value for value in missing if value not in found]):
            break
    return found


def on_all_days(rows: QuerySet[Any], *fields: str) -> dict[Any, Any]:
    """Two fields of these rows, the first unique: all open ones, and history a few days at a time."""
    rows = rows.order_by().values_list(*fields)
    found: dict[Any, Any] = {}
    if not is_postgresql(connections[rows.db]):
        return dict(rows)
    for days in chain([{"day": LIVE}], windows(rows), [{"day": LIVE}]):
        found.update(_without_locks(rows.filter(**days)))
    return found


def newest(rows: QuerySet[Any], most: int) -> list[Any]:
    """Those of these rows with the greatest keys, the greatest first; history is read a few days at a time."""
    rows = rows.order_by("-pk")
    if not is_postgresql(connections[rows.db]):
        return list(rows[:most])
    found: dict[Any, Any] = {}
    for days in chain([{"day": LIVE}], windows(rows), [{"day": LIVE}]):
        found |= {row.pk: row for row in _without_locks(rows.filter(**days)[:most])}
    return [found[pk] for pk in sorted(found, reverse=True)[:most]]


def windows(rows: QuerySet[Any]) -> Iterator[Mapping[str, Any]]:
    """All of history, as conditions for a few partitions each, the oldest first."""
    begin = FIRST_DAY
    for last in existing_days(rows.db, rows.model._meta.db_table)[_AT_ONCE - 1 :: _AT_ONCE]:
        yield {"day__gte": begin, "day__lte": last}
        begin = last + 1
    yield {"day__gte": begin, "day__lte": _LAST_DAY}


def _without_locks(rows: QuerySet[Any]) -> list[Any]:
    """These rows. An open transaction does not keep the locks of the partitions that were read."""
    if not connections[rows.db].in_atomic_block:
        return list(rows)
    with transaction.atomic(using=rows.db):
        found = list(rows)
        transaction.set_rollback(True, using=rows.db)
    return found
