"""History, the settled messages: partitions and deletion.

On PostgreSQL history has one partition for each day of settling. The relay's housekeeping creates partitions some days ahead
and drops old ones; a row of a day without a partition is in the default partition. Creating or dropping one locks history
exclusively for a moment. It waits for that lock for at most `_LONGEST_WAIT`, because settling waits behind it. Publishing does
not wait, because the live partition has another parent.

On SQLite history is the rows whose `day` is not `LIVE`. They are deleted in small transactions.

A message with a pending callback is not deleted, and its day is not dropped.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING

from django.db import DatabaseError, connections, transaction
from django.db.models import Exists, OuterRef, Q, QuerySet

from exactly_once.sql.connections import is_postgresql, lock_timeout
from exactly_once.sql.faults import is_collision, sqlstate_of
from exactly_once.sql.now import DatabaseTime
from exactly_once.sql.rows import delete_in_chunks
from outbox.models import OutboxMessage, PendingCallback
from outbox.states import FIRST_DAY
from outbox.store.dialect import HISTORY, TABLE

if TYPE_CHECKING:
    pass

_LONGEST_WAIT = timedelta(seconds=0.2)
_LONGEST_READ = timedelta(seconds=2)
_DEFAULT = f"{HISTORY}_default"
_DAY = re.compile(rf"{TABLE}_(\d{{4}})_(\d\d)_(\d\d)")
_EPOCH = date(1970, 1, 1)
_PENDING = PendingCallback._meta.db_table
_DAYS = f"SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = '{HISTORY}'::regclass"
COUNTED_EXACTLY_BYTES = 16 * 1024 * 1024
INSUFFICIENT_PRIVILEGE, CHECK_VIOLATION = "42501", "23514"
_ALONE = f"LOCK TABLE ONLY {HISTORY} IN ACCESS EXCLUSIVE MODE"
_BEGINNING = uuid.UUID(int=0)


def days(alias: str) -> list[int]:
    """The days that have their own partition, the oldest first."""
    with connections[alias].cursor() as cursor:
        cursor.execute(_DAYS)
        named = [_DAY.fullmatch(name.rpartition(".")[2]) for (name,) in cursor.fetchall()]
    return sorted((date(*map(int, match.groups())) - _EPOCH).days for match in named if match)


def first_day(alias: str) -> int | None:
    """The first day that has rows. A large default partition is left out, because it has no index to search."""
    with connections[alias].cursor() as cursor:
        found: list[int] = []
        for day in days(alias):
            cursor.execute(f"SELECT 1 FROM {_name(day)} LIMIT 1")
            if cursor.fetchone():
                found.append(day)
                break
        cursor.execute(f"SELECT pg_relation_size('{_DEFAULT}')")
        if cursor.fetchone()[0] <= COUNTED_EXACTLY_BYTES:
            cursor.execute(f"SELECT min(day) FROM {_DEFAULT}")
            found += [day for (day,) in cursor.fetchall() if day is not None]
    return min(found, default=None)


def day_of(alias: str, ago: timedelta = timedelta()) -> int:
    """The present day by the database's clock, or the day `ago` before now."""
    connection = connections[alias]
    with connection.cursor() as cursor:
        if is_postgresql(connection):
            cursor.execute(
                "SELECT CAST(floor(EXTRACT(EPOCH FROM statement_timestamp() - make_interval(secs => %s)) / 86400) AS int)",
                [ago.total_seconds()],
            )
        else:
            cursor.execute("SELECT CAST(julianday('now') - 2440587.5 - %s AS int)", [ago / timedelta(days=1)])
        day: int = cursor.fetchone()[0]
    return day


def date_of(day: int) -> date:
    return _EPOCH + timedelta(days=day)


def make_day(alias: str, day: int, longest_wait: timedelta | None = None) -> bool:
    """Create the partition of this day, unless it exists. True: it exists now.

    Raises:
        django.db.Error: history was locked for too long; the default partition is too large to be read in time; the user may
            not create tables; or the default partition already has rows of this day, which stay there.
    """
    wait = longest_wait or _LONGEST_WAIT
    with transaction.atomic(using=alias), lock_timeout(alias, wait), connections[alias].cursor() as cursor:
        cursor.execute(_ALONE)  # two transactions that find no partition would both create one
        # PostgreSQL reads the default partition, to check that it has no row of this day.
        cursor.execute("SELECT set_config('statement_timeout', %s, true)", [f"{_LONGEST_READ.total_seconds():.0f}s"])
        cursor.execute(f"CREATE TABLE IF NOT EXISTS {_name(day)} PARTITION OF {HISTORY} FOR VALUES FROM ({day}) TO ({day + 1})")
    return True


def drop_day(alias: str, day: int, longest_wait: timedelta | None = None) -> bool:
    """Drop the partition of this day. False: it does not exist, or one of its messages has a pending callback.

    Raises:
        django.db.Error: history was locked for too long, or the user does not own the tables.
    """
    name, wait = _name(day), longest_wait or _LONGEST_WAIT
    with transaction.atomic(using=alias), lock_timeout(alias, wait), connections[alias].cursor() as cursor:
        # Parent before partition, as every statement locks them, and before the query: no message is restored meanwhile.
        cursor.execute(_ALONE)
        cursor.execute(f"SELECT to_regclass('{name}')")
        if cursor.fetchone() == (None,):
            return False
        cursor.execute(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")
        cursor.execute(f"SELECT 1 FROM {_PENDING} JOIN {name} USING (message_id) LIMIT 1")
        if cursor.fetchone():
            return False
        cursor.execute(f"DROP TABLE {name}")
    return True


def _name(day: int) -> str:
    return f"{TABLE}_{date_of(day):%Y_%m_%d}"


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
    days_in_default = _in_default(alias, last)
    yield from _deleted(rows.filter(day__in=days_in_default), chunk) if days_in_default else ()


def days_with_pending_callbacks(alias: str, last: int) -> list[int]:
    """The days up to `last` of which a message has a pending callback. Without such a callback, history is not read."""
    end = datetime.combine(date_of(last + 1), time(), UTC)
    if not PendingCallback.objects.using(alias).filter(settled_at__lt=end).exists():
        return []
    pending = OutboxMessage.objects.using(alias).filter(day__gte=FIRST_DAY, day__lte=last).filter(_IS_PENDING)
    return sorted(set(pending.values_list("day", flat=True)))


def may_make_days(alias: str) -> bool:
    """May the user of this connection create and drop partitions?"""
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "SELECT pg_has_role(relowner, 'USAGE') AND has_schema_privilege(relnamespace, 'CREATE') FROM pg_class "
            f"WHERE oid = '{HISTORY}'::regclass"
        )
        return bool(cursor.fetchone()[0])


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
        cursor.execute(f"SELECT count(*) FROM {_name(day)}")
        count: int = cursor.fetchone()[0]
    try:
        return count if drop_day(alias, day) else 0
    except DatabaseError as error:
        if is_collision(error) or sqlstate_of(error) == INSUFFICIENT_PRIVILEGE:
            return 0
        raise


def _in_default(alias: str, last: int) -> list[int]:
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT DISTINCT day FROM {_DEFAULT} WHERE day <= %s", [last])
        return [day for (day,) in cursor.fetchall()]
