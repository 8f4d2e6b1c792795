"""The health of a database: sizes, dead rows, the last vacuum, and what pins the vacuum horizon.

Vacuum removes no row version that the oldest open snapshot may see. While a transaction, a replication slot or a prepared
transaction pins this horizon, the versions of published messages pile up, and relays read past them.

Everything is read from PostgreSQL's statistics and catalogs; no table of messages is read. On SQLite only the size of the file
is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connections

from exactly_once.sql.connections import is_postgresql

MOST_PINS = 20
_MOST_INDEXES = 10
_NAME = "CAST(CAST(c.oid AS regclass) AS text)"
_SIZES = {
    "postgresql": "SELECT pg_database_size(current_database())",
    "sqlite": "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size",
}
"""Of the database, by `connection.vendor`."""


@dataclass(frozen=True)
class TableHealth:
    """A table, or all partitions of one.

    Attributes:
        rows, dead_rows: PostgreSQL's estimates; None if it has none.
        parent: the table that it is a partition of, if that is itself one; "" otherwise.
        partitions: how many partitions it has; 0 for a plain table.
    """

    name: str
    table_bytes: int
    index_bytes: int
    rows: int | None
    dead_rows: int | None
    last_vacuum: datetime | None
    last_analyze: datetime | None
    parent: str = ""
    partitions: int = 0

    @property
    def total_bytes(self) -> int:
        return self.table_bytes + self.index_bytes


@dataclass(frozen=True)
class IndexHealth:
    """An index, and how often it was searched since the statistics were reset."""

    name: str
    size_bytes: int
    scans: int | None


@dataclass(frozen=True)
class Pin:
    """What keeps the vacuum horizon.

    Attributes:
        kind: "session", "replication slot" or "prepared transaction".
        name: the process id, the slot's name or the transaction's identifier.
        age: how many transactions ago its snapshot is.
        open_for: how long its transaction has been open; None if that is unknown.
        query_for: how long its last statement has been running, or ago; None if there is none.
    """

    kind: str
    name: str
    age: int
    application: str = ""
    user: str = ""
    state: str = ""
    open_for: timedelta | None = None
    query_for: timedelta | None = None


def database_bytes(alias: str) -> int | None:
    """The size of the database."""
    if (statement := _SIZES.get(connections[alias].vendor)) is None:
        return None
    with connections[alias].cursor() as cursor:
        cursor.execute(statement)
        return int(cursor.fetchone()[0])


def tables(alias: str, names: Sequence[str]) -> list[TableHealth] | None:
    """These tables and their partitions, the largest first; None on a database that has no statistics of sizes."""
    rows = _read(
        alias,
        f"SELECT {_NAME}, pg_table_size(c.oid), pg_indexes_size(c.oid), s.n_live_tup, s.n_dead_tup, "  # noqa: S608 - our own names
        "greatest(s.last_vacuum, s.last_autovacuum), greatest(s.last_analyze, s.last_autoanalyze), "
        "coalesce(CAST(ours.parent AS text), '') FROM ("
        "SELECT to_regclass(name) AS oid, NULL::regclass AS parent FROM unnest(%s::text[]) name UNION ALL "
        "SELECT tree.relid, CASE WHEN tree.level > 1 THEN tree.parentrelid END "
        "FROM unnest(%s::text[]) name, pg_partition_tree(to_regclass(name)) tree WHERE tree.isleaf"
        ") ours JOIN pg_class c ON c.oid = ours.oid AND c.relkind = 'r' LEFT JOIN pg_stat_user_tables s ON s.relid = c.oid",
        [list(names), list(names)],
    )
    return None if rows is None else _largest_first([TableHealth(*row) for row in rows])


def with_partitions_summed(found: Sequence[TableHealth]) -> list[TableHealth]:
    """The tables with all partitions of one parent as one line, the largest first."""
    parents: dict[str, list[TableHealth]] = {}
    for table in found:
        parents.setdefault(table.parent, []).append(table)
    plain = parents.pop("", [])
    return _largest_first([*plain, *(_summed(parent, tables) for parent, tables in parents.items())])


def _largest_first(found: Sequence[TableHealth]) -> list[TableHealth]:
    return sorted(found, key=lambda table: table.total_bytes, reverse=True)


def _summed(name: str, partitions: Sequence[TableHealth]) -> TableHealth:
    """All these partitions as one table. The oldest vacuum counts; None if one was never vacuumed."""
    return TableHealth(
        name=name,
        table_bytes=sum(table.table_bytes for table in partitions),
        index_bytes=sum(table.index_bytes for table in partitions),
        rows=sum(table.rows or 0 for table in partitions),
        dead_rows=sum(table.dead_rows or 0 for table in partitions),
        last_vacuum=_earliest([table.last_vacuum for table in partitions if table.rows]),
        last_analyze=_earliest([table.last_analyze for table in partitions if table.rows]),
        partitions=len(partitions),
    )


def largest_indexes(alias: str, names: Sequence[str]) -> list[IndexHealth] | None:
    """The largest indexes of these tables, without those of partitions of history; None on a database other than PostgreSQL."""
    rows = _read(
        alias,
        f"SELECT {_NAME}, pg_relation_size(c.oid), s.idx_scan "  # noqa: S608 - our own names
        "FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
        "LEFT JOIN pg_stat_user_indexes s ON s.indexrelid = c.oid "
        "WHERE i.indrelid IN (SELECT to_regclass(name) FROM unnest(%s::text[]) name) AND c.relkind = 'i' "
        f"ORDER BY 2 DESC LIMIT {_MOST_INDEXES}",
        [list(names)],
    )
    return None if rows is None else [IndexHealth(*row) for row in rows]


def pins(alias: str) -> list[Pin] | None:
    """What keeps the vacuum horizon of this database, the oldest first; None on a database without one."""
    rows = _read(alias, _PINS)
    return None if rows is None else [Pin(*row) for row in rows]


def sees_all_sessions(alias: str) -> bool:
    """May this user see the transactions of other users?"""
    return _read(alias, "SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')") == [(True,)]


def _read(alias: str, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]] | None:
    """The rows of a statement for PostgreSQL; None on another database."""
    if not is_postgresql(connections[alias]):
        return None
    with connections[alias].cursor() as cursor:
        cursor.execute(statement, parameters)
        return list(cursor.fetchall())


_PINS = f"""
SELECT 'session', CAST(pid AS text), greatest(age(backend_xmin), age(backend_xid)), coalesce(application_name, ''),
  coalesce(usename::text, ''), coalesce(state, ''), greatest(statement_timestamp() - xact_start, '0'),
  greatest(statement_timestamp() - query_start, '0')
FROM pg_stat_activity
WHERE (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND pid <> pg_backend_pid()
  AND (datname = current_database() OR datname IS NULL)
UNION ALL
SELECT 'replication slot', slot_name::text, age(xmin), coalesce(plugin::text, ''), '',
  CASE WHEN active THEN 'active' ELSE 'inactive' END, NULL, NULL
FROM pg_replication_slots WHERE xmin IS NOT NULL
UNION ALL
SELECT 'prepared transaction', gid, age(transaction), '', owner::text, 'prepared',
  greatest(statement_timestamp() - prepared, '0'), NULL
FROM pg_prepared_xacts WHERE database = current_database()
ORDER BY 3 DESC LIMIT {MOST_PINS}
"""  # noqa: S608 - our own number


def _earliest(instants: Sequence[datetime | None]) -> datetime | None:
    known = [instant for instant in instants if instant is not None]
    return min(known) if known and len(known) == len(instants) else None
