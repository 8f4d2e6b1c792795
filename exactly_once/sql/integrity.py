"""What a restore, a switch to a replica, or an upgrade of the operating system can leave wrong in a PostgreSQL database.

Tables and rows are complete, so nothing fails at once: a sequence draws numbers that exist already, an index is in the order of
another collation, a partition is published and has no key. Nothing here reads a whole table, or locks many partitions together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from django.db import connections, transaction
from django.db.models import AutoField, Model

from exactly_once.sql.connections import fetch, is_postgresql

_NUMBERED = (
    "SELECT sequence, name, leaf::text, CASE WHEN NOT has_sequence_privilege(sequence, 'SELECT') THEN sequence "
    "WHEN NOT has_table_privilege(leaf, 'SELECT') THEN leaf::text END "
    "FROM unnest(%s::text[], %s::text[]) AS numbered(name, by) "
    "LEFT JOIN LATERAL pg_partition_tree(to_regclass(name)) tree ON tree.isleaf "
    "CROSS JOIN LATERAL (SELECT coalesce(tree.relid, to_regclass(name)) AS leaf) l "
    "CROSS JOIN LATERAL (SELECT CASE WHEN to_regclass(by) IS NOT NULL THEN pg_get_serial_sequence(by, 'id') END AS sequence) s "
    "WHERE leaf IS NOT NULL AND sequence IS NOT NULL"
)
"""Tables without partitions, and partitions, each with the sequence of its ids, and what of both the user may not read."""
_HAS_NEXT = "EXISTS (SELECT 1 FROM {table} WHERE id >= (SELECT last_value + is_called::int FROM {sequence}))"
"""The sequence is read after the snapshot, so it is not behind the rows that transactions insert meanwhile."""
_TABLES_AT_ONCE = 30
"""Each takes some locks of the server's lock table until the end of the transaction."""
_WITHOUT_IDENTITY = (
    "SELECT tree.relid::regclass::text FROM pg_partition_tree(to_regclass(%s)) tree "
    "JOIN pg_class leaf ON leaf.oid = tree.relid AND leaf.relkind = 'r' WHERE leaf.relreplident <> 'f' AND NOT EXISTS ("
    "SELECT 1 FROM pg_index WHERE indrelid = leaf.oid AND (indisreplident OR leaf.relreplident = 'd' AND indisprimary)"
    ") ORDER BY 1"
)
_HAS_COLLATION_VERSIONS = 150000


def numbered(models: Iterable[type[Model]]) -> dict[type[Model], type[Model]]:
    """Those of these models whose ids come from a sequence, each with the model that has the sequence.

    A model whose ids are those of another one names it, as `numbered_by`.
    """
    by = {model: getattr(model, "numbered_by", model) for model in models if not model._meta.proxy}
    return {model: numbers for model, numbers in by.items() if isinstance(numbers._meta.pk, AutoField)}


def sequences_behind(alias: str, models: Iterable[type[Model]]) -> Iterator[tuple[str, str]]:
    """The sequences whose next id is not above the ids of these models, each with the statement that corrects it."""
    leaves, tables = defaultdict[str, list[str]](list), defaultdict[str, dict[str, None]](dict)
    for sequence, table, leaf, unread in _leaves(alias, models):
        tables[sequence][table] = None
        if unread is None:
            leaves[sequence].append(leaf)
    for sequence, parts in leaves.items():
        batches = (parts[first : first + _TABLES_AT_ONCE] for first in range(0, len(parts), _TABLES_AT_ONCE))
        if any(_have_next(alias, batch, sequence) for batch in batches):
            highest = ", ".join(f"(SELECT max(id) FROM {table})" for table in tables[sequence])  # noqa: S608 - names of models, quoted
            yield sequence, f"SELECT setval('{sequence}', greatest({highest}))"


def unreadable(alias: str, models: Iterable[type[Model]]) -> list[str]:
    """Sequences and tables of these models that `sequences_behind` leaves out, because the user may not read them."""
    return sorted({unread for *_, unread in _leaves(alias, models) if unread is not None})


def _leaves(alias: str, models: Iterable[type[Model]]) -> list[tuple[str, str, str, str | None]]:
    connection = connections[alias]
    if not is_postgresql(connection):
        return []  # SQLite also looks into the table
    pairs = zip(*numbered(models).items(), strict=True)
    names = [[connection.ops.quote_name(model._meta.db_table) for model in column] for column in pairs]
    return fetch(connection, _NUMBERED, names or [[], []])


def _have_next(alias: str, tables: Iterable[str], sequence: str) -> bool:
    """Is the next id of the sequence, or a higher one, in one of these tables?"""
    statement = "SELECT " + " OR ".join(_HAS_NEXT.format(table=table, sequence=sequence) for table in tables)
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        # Without statistics, as after a restore, the planner would read the table instead of an index.
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(statement)
        return bool(cursor.fetchone()[0])


def without_identity(alias: str, model: type[Model]) -> list[str]:
    """The partitions whose rows cannot be updated or deleted while they are published, for example FOR ALL TABLES."""
    connection = connections[alias]
    if not is_postgresql(connection):
        return []
    return [name for (name,) in fetch(connection, _WITHOUT_IDENTITY, [connection.ops.quote_name(model._meta.db_table)])]


def changed_collation(alias: str) -> tuple[str, str, str] | None:
    """The name of the database, the version of its collation, and that of the server's, if they differ.

    PostgreSQL 14 does not store it: None.
    """
    connection = connections[alias]
    if not is_postgresql(connection):
        return None
    if fetch(connection, "SELECT current_setting('server_version_num')::int")[0][0] < _HAS_COLLATION_VERSIONS:
        return None
    changed = (
        "SELECT datname, datcollversion, pg_database_collation_actual_version(oid) FROM pg_database "
        "WHERE datname = current_database() AND datcollversion <> pg_database_collation_actual_version(oid)"
    )
    return next(iter(fetch(connection, changed)), None)
