"""History, the settled messages: the days that are dropped, and deletion.

On PostgreSQL history has one partition for each day of settling, see `exactly_once.sql.partitions`; a row of a day without a
partition is in the default partition. On SQLite history is the rows whose `day` is not `LIVE`. They are deleted in small
transactions.

A message with a pending callback is not deleted, and its day is not dropped.
"""

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, time, timedelta
from typing import Any

from django.db import DatabaseError, connections
from django.db.models import Exists, OuterRef, Q, QuerySet

from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.days import FIRST_DAY, date_of, day_of
from exactly_once.sql.faults import is_collision, sqlstate_of
from exactly_once.sql.now import DatabaseTime
from exactly_once.sql.partitions import INSUFFICIENT_PRIVILEGE, Days
from exactly_once.sql.rows import delete_in_chunks
from outbox.models import OutboxMessage, PendingCallback
from outbox.store.dialect import TABLE

_PENDING = PendingCallback._meta.db_table
_BEGINNING = uuid.UUID(int=0)


_DAYS = Days(TABLE)
days, first_day, make_day, may_make_days = _DAYS.existing, _DAYS.first, _DAYS.make, _DAYS.may_be_made


def drop_day(alias: str, day: int, longest_wait: timedelta | None = None) -> bool:
    """Drop the partition of this day. False: it does not exist, or one of its messages has a pending callback.

    Raises:
        django.db.Error: see `Days.drop`.
    """
    return _DAYS.drop(alias, day, longest_wait, keeps=_has_pending)


def _has_pending(cursor: Any, name: str) -> bool:
    cursor.execute(f"SELECT 1 FROM {_PENDING} JOIN {name} USING (message_id) LIMIT 1")
    return cursor.fetchone() is not None


def purge_settled(alias: str, older_than: timedelta, *, chunk: int = 1000) -> Iterator[int]:
    """Delete the messages that were settled longer ago than this; yields the number of rows deleted by each step.

    Whole days are dropped where that is possible at once. Other rows are deleted in small transactions.
    """
    if is_postgresql(connections[alias]):
        for day in days(alias):
            if day < day_of(alias, older_than) and (count := _dropped(alias, day)):
                yield count
    yield from _deleted(_old(alias).filter(settled_at__lt=DatabaseTime(-older_than)), chunk)


def purgeable(alias: str, older_than: timedelta) -> int:
    """The number of rows that `purge_settled` would delete."""
    return _old(alias).filter(settled_at__lt=DatabaseTime(-older_than)).count()


def delete_days(alias: str, last: int, *, chunk: int) -> Iterator[int]:
    """Delete the rows of all days up to `last`; yields the number of rows deleted by each small transaction.

    On PostgreSQL it deletes only rows of the default partition.
    """
    rows = _old(alias).filter(day__lte=last)
    if not is_postgresql(connections[alias]):
        yield from _deleted(rows, chunk)
        return
    days_in_default = _DAYS.in_default(alias, last)
    yield from _deleted(rows.filter(day__in=days_in_default), chunk) if days_in_default else ()


def days_with_pending_callbacks(alias: str, last: int) -> list[int]:
    """The days up to `last` of which a message has a pending callback. Without such a callback, history is not read."""
    end = datetime.combine(date_of(last + 1), time(), UTC)
    if not PendingCallback.objects.using(alias).filter(settled_at__lt=end).exists():
        return []
    pending = OutboxMessage.objects.using(alias).filter(day__gte=FIRST_DAY, day__lte=last).filter(_IS_PENDING)
    return sorted(set(pending.values_list("day", flat=True)))


_IS_PENDING = Q(Exists(PendingCallback.objects.filter(message=OuterRef("message_id"))))


def _old(alias: str) -> QuerySet[OutboxMessage]:
    return OutboxMessage.objects.using(alias).filter(day__gte=FIRST_DAY).exclude(_IS_PENDING)


def _deleted(rows: QuerySet[OutboxMessage], chunk: int) -> Iterator[int]:
    """Delete along an index: on PostgreSQL each chunk starts after the last one, so that it does not read the deleted rows."""
    if not is_postgresql(connections[rows.db]):
        yield from delete_in_chunks(rows, by="day", chunk=chunk)
        return
    last = _BEGINNING
    while ids := list(rows.filter(message_id__gt=last).order_by("message_id").values_list("message_id", flat=True)[:chunk]):
        last = ids[-1]
        # With all conditions again: a message restored meanwhile may be settled again, with a new pending callback.
        yield rows.filter(message_id__in=ids).delete()[0]


def _dropped(alias: str, day: int) -> int:
    """Drop this day; the number of its rows. 0: it could not be dropped, so its rows have to be deleted."""
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM {_DAYS.name(day)}")
        count: int = cursor.fetchone()[0]
    try:
        return count if drop_day(alias, day) else 0
    except DatabaseError as error:
        if is_collision(error) or sqlstate_of(error) == INSUFFICIENT_PRIVILEGE:
            return 0
        raise
