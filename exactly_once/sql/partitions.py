"""Tables of messages in partitions: those that are not settled in one, and history with one for each day of settling.

For example that of the outbox; the inbox's is the same.

    outbox_outboxmessage                      all messages, by the column `day`
      outbox_outboxmessage_live               day 0: messages that are not settled; Django's own table, with all its indexes
      outbox_outboxmessage_history            settled messages
        outbox_outboxmessage_2026_11_22       one day of them, created and dropped by housekeeping
        outbox_outboxmessage_history_default  days without their own partition

History is partitioned again, so that creating and dropping a day locks neither the table nor the live partition. Creating one
locks the default partition for a moment, dropping one all of history. Both wait for that lock for at most `LONGEST_WAIT`,
because settling waits behind them.

Each partition has a primary key of its own. Without one PostgreSQL refuses to update and delete rows that are published, as by
a publication FOR ALL TABLES.

On PostgreSQL a statement that does not say on which days its rows are locks the partition of each day, and all its indexes.
With 400 days, two such statements at once exhaust the lock table. So a statement names its days, as numbers in its text,
because PostgreSQL leaves partitions out only when it plans. Where a row is must be found first: among its likely days, then on
all others, a few at a time, without keeping their locks.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from itertools import chain
from typing import Any

from django.db import connections, migrations, router, transaction
from django.db.models import Model, QuerySet

from exactly_once.process.clock import utcnow
from exactly_once.sql.connections import decision_transaction, fetch, is_postgresql, lock_timeout
from exactly_once.sql.days import FIRST_DAY, LIVE, date_of, number_of

LONGEST_WAIT = timedelta(seconds=0.2)
DEFAULT_SUFFIX = "_history_default"
"""Of the names of default partitions."""
_LONGEST_READ = timedelta(seconds=2)
_LIVE_STORAGE = (
    "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0, "
    "autovacuum_analyze_scale_factor = 0.05"
)
"""Storage parameters of a live partition, into which every open message is inserted, and from which it is deleted. It needs a
vacuum after a number of dead rows, not after a fraction of its size; and at full speed, because its readers read dead rows."""

_AT_ONCE = 16
_LAST_DAY = 2**31 - 1


def existing_days(alias: str, table: str) -> list[int]:
    """The days of this table that have their own partition, the oldest first."""
    pattern = re.compile(rf"{table}_(\d{{4}})_(\d\d)_(\d\d)")
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = '{table}_history'::regclass")  # noqa: S608
        named = [pattern.fullmatch(name.rpartition(".")[2]) for (name,) in cursor.fetchall()]
    return sorted(number_of(date(*map(int, match.groups()))) for match in named if match)


@dataclass(frozen=True)
class Days:
    """The partitions of the history of a table.

    Attributes:
        key: the primary key of each partition. It is not one of the whole table, where it would have to include the day.
    """

    table: str
    key: str

    @property
    def history(self) -> str:
        return f"{self.table}_history"

    @property
    def default(self) -> str:
        return f"{self.table}{DEFAULT_SUFFIX}"

    def name(self, day: int) -> str:
        """The table of a day."""
        return f"{self.table}_{date_of(day):%Y_%m_%d}"

    def existing(self, alias: str) -> list[int]:
        """As `existing_days`."""
        return existing_days(alias, self.table)

    def in_default(self, alias: str, last: int) -> list[int]:
        """The days up to `last` that have rows in the default partition. It reads all of it."""
        days = f"SELECT DISTINCT day FROM {self.default} WHERE day <= %s"  # noqa: S608 - our own names
        return [day for (day,) in fetch(connections[alias], days, [last])]

    def make(self, alias: str, day: int, longest_wait: timedelta | None = None) -> bool:
        """Create the partition of this day, unless it exists. True: it exists now.

        Raises:
            django.db.Error: the default partition was locked for too long, or is too large to be read in time; the user may not
                create tables; the default partition already has rows of this day, which stay there; or another table has the
                name of the partition, as one that was detached.
        """
        name, wait = self.name(day), longest_wait or LONGEST_WAIT
        with decision_transaction(alias), lock_timeout(alias, wait), connections[alias].cursor() as cursor:
            # Two transactions that find no partition would both create one. Writers of history do not wait for this lock.
            cursor.execute(f"LOCK TABLE ONLY {self.history} IN SHARE UPDATE EXCLUSIVE MODE")
            if day in self.existing(alias):
                return True
            # PostgreSQL reads the default partition, to check that it has no row of this day.
            cursor.execute("SELECT set_config('statement_timeout', %s, true)", [f"{_LONGEST_READ.total_seconds():.0f}s"])
            cursor.execute(f"CREATE TABLE {name} (LIKE {self.history} INCLUDING DEFAULTS INCLUDING CONSTRAINTS)")
            cursor.execute(f"ALTER TABLE {self.history} ATTACH PARTITION {name} FOR VALUES FROM ({day}) TO ({day + 1})")
            cursor.execute(f"ALTER TABLE {name} ADD PRIMARY KEY ({self.key})")
        return True

    def drop(
        self, alias: str, day: int, longest_wait: timedelta | None = None, *, keeps: Callable[[], bool] | None = None
    ) -> bool:
        """Drop the partition of this day. False: history has none (any more), or it is not to be dropped.

        Args:
            keeps: asked whether it is to be kept, when it is locked.

        Raises:
            django.db.Error: history was locked for too long, or the user does not own the tables.
        """
        name, wait = self.name(day), longest_wait or LONGEST_WAIT
        with decision_transaction(alias), lock_timeout(alias, wait), connections[alias].cursor() as cursor:
            # Parent before partition, as every statement locks them, and before the question: no row is moved meanwhile.
            cursor.execute(f"LOCK TABLE ONLY {self.history} IN ACCESS EXCLUSIVE MODE")
            if day not in self.existing(alias):  # dropped meanwhile, or detached, as for an archive
                return False
            cursor.execute(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")
            if keeps is not None and keeps():
                return False
            cursor.execute(f"DROP TABLE {name}")
        return True

    def may_be_made(self, alias: str) -> bool:
        """May the user of this connection create and drop partitions?"""
        with connections[alias].cursor() as cursor:
            cursor.execute(
                "SELECT pg_has_role(relowner, 'USAGE') AND has_schema_privilege(relnamespace, 'CREATE') FROM pg_class "
                "WHERE oid = %s::regclass",
                [self.history],
            )
            return bool(cursor.fetchone()[0])


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a table is partitioned, for its migration.

    Attributes:
        prefix: of the names of constraints and indexes.
        settled: the condition of settled rows.
        key: the primary key of each partition of history, by which a row is found.
        indexes: of history; each is what follows the name of the index and the table.
        is_numbered: its `id` has an identity, which a partition cannot have before PostgreSQL 17.
    """

    prefix: str
    settled: str
    key: str
    indexes: Sequence[str]
    is_numbered: bool = False

    def statements(self, table: str) -> list[str]:
        """The statements that make Django's table the live partition of a partitioned table."""
        live, history, sequence = f"{table}_live", f"{table}_history", f"{table}_id_seq"
        is_settled, days = f"{self.prefix}_history_is_settled CHECK ({self.settled})", "FROM (1) TO (MAXVALUE)"
        numbering = [
            f"ALTER TABLE {live} ALTER COLUMN id DROP IDENTITY",
            f"CREATE SEQUENCE {sequence} AS bigint",
            f"ALTER TABLE {live} ALTER COLUMN id SET DEFAULT nextval('{sequence}')",
        ]
        return [
            *(numbering if self.is_numbered else []),
            f"CREATE TABLE {table} (LIKE {live} INCLUDING DEFAULTS INCLUDING CONSTRAINTS) PARTITION BY RANGE (day)",
            *([f"ALTER SEQUENCE {sequence} OWNED BY {table}.id"] if self.is_numbered else []),
            f"ALTER TABLE {table} ATTACH PARTITION {live} FOR VALUES FROM (0) TO (1)",
            f"ALTER TABLE {live} SET ({_LIVE_STORAGE})",
            # Because of this constraint a query for other states excludes history, and a settled row that is made open by hand
            # without its day is refused, instead of never being found.
            f"CREATE TABLE {history} PARTITION OF {table} (CONSTRAINT {is_settled}) FOR VALUES {days} PARTITION BY RANGE (day)",
            *(index.format(history=history) for index in self.indexes),
            f"CREATE TABLE {history}_default PARTITION OF {history} DEFAULT",
            f"ALTER TABLE {history}_default ADD PRIMARY KEY ({self.key})",
        ]

    def partition_plain_table(self, model: type[Model], *, using: str, **signal: Any) -> None:
        """After `post_migrate`: partition a table that Django has created without migrations, as with `--nomigrations`."""
        connection, table = connections[using], model._meta.db_table
        if connection.vendor != "postgresql" or not router.allow_migrate_model(using, model):
            return
        with connection.cursor() as cursor, transaction.atomic(using=using):
            cursor.execute("SELECT relkind = 'r' FROM pg_class WHERE oid = to_regclass(%s)", [table])
            if cursor.fetchone() == (True,):
                for statement in (f"ALTER TABLE {table} RENAME TO {table}_live", *self.statements(table)):
                    cursor.execute(statement)


class CreatePartitioned(migrations.CreateModel):
    """Create the table of a model, on PostgreSQL in partitions. A subclass has the layout."""

    layout: Layout

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        model = to_state.apps.get_model(app_label, self.name)
        alias = schema_editor.connection.alias
        if schema_editor.connection.vendor != "postgresql" or not self.allow_migrate_model(alias, model):
            super().database_forwards(app_label, schema_editor, from_state, to_state)
            return
        table = model._meta.db_table
        with _called(model, f"{table}_live"):
            schema_editor.create_model(model)
        # A backend without a transaction around the migration keeps what was done before a fault. It creates the model again.
        with transaction.atomic(using=alias):
            if schema_editor.collect_sql or not _is_partitioned(schema_editor.connection, table):
                for statement in self.layout.statements(table):
                    schema_editor.execute(statement, params=None)
        self.defer(schema_editor, f"{table}_live")

    def defer(self, schema_editor: Any, live: str) -> None:
        """Append to the statements that are executed after all others of the migration."""


def _is_partitioned(connection: Any, table: str) -> bool:
    return fetch(connection, "SELECT relkind = 'p' FROM pg_class WHERE oid = to_regclass(%s)", [table]) == [(True,)]


@contextmanager
def _called(model: Any, table: str) -> Iterator[None]:
    ours = model._meta.db_table
    model._meta.db_table = table
    try:
        yield
    finally:
        model._meta.db_table = ours


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
