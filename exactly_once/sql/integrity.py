"""What a restore, a switch to a replica, or an upgrade of the operating system can leave wrong in a PostgreSQL database.

Tables and rows are complete, so nothing fails at once: a sequence draws numbers that exist already, an index is in the order of
another collation, a partition is published and has no key. Nothing here reads a whole table, or locks many partitions together.
"""

from __future__ import annotations

from django.db import connections
from django.db.models import Model

from exactly_once.sql.connections import is_postgresql

_WITHOUT_IDENTITY = (
    "SELECT tree.relid::regclass::text FROM pg_partition_tree(to_regclass(%s)) tree "
    "JOIN pg_class leaf ON leaf.oid = tree.relid AND leaf.relkind = 'r' WHERE leaf.relreplident <> 'f' AND NOT EXISTS ("
    "SELECT 1 FROM pg_index WHERE indrelid = leaf.oid AND (indisreplident OR leaf.relreplident = 'd' AND indisprimary)"
    ") ORDER BY 1"
)


def without_identity(alias: str, model: type[Model]) -> list[str]:
    """The partitions whose rows cannot be updated or deleted while they are published, for example FOR ALL TABLES."""
    connection = connections[alias]
    if not is_postgresql(connection):
        return []
    with connection.cursor() as cursor:
        cursor.execute(_WITHOUT_IDENTITY, [connection.ops.quote_name(model._meta.db_table)])
        return [name for (name,) in cursor.fetchall()]
