"""Django's `flush`, which every test that commits runs at its end, in a faster form: it took half of the suite's time.

Django truncates every table and then lets every application fill them again. Of some twenty tables a test writes to three,
and each one that is truncated is a new file for it and for each of its indexes. So here only the tables that have been
written to are emptied, and what `migrate` writes (content types and permissions) stays.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand
from django.core.management.color import no_style
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.backends.base.base import BaseDatabaseWrapper

# No test may change them.
FILLED_BY_MIGRATE = {"django_content_type", "auth_permission"}

# As TRUNCATE leaves it, a table has no page and no statistics.
WRITTEN_TO = (
    "SELECT relname FROM unnest(%s::regclass[]) given(name) LEFT JOIN LATERAL pg_partition_tree(name) part ON isleaf "
    "JOIN pg_class ON oid = COALESCE(relid, name) WHERE reltuples >= 0 OR pg_relation_size(oid) > 0"
)


class Command(BaseCommand):
    help = "Remove what a test has written."
    stealth_options = ("interactive", "database", "reset_sequences", "allow_cascade", "inhibit_post_migrate")

    def handle(self, *, database: str = DEFAULT_DB_ALIAS, **options: Any) -> None:
        connection = connections[database]
        names = connection.introspection.django_table_names(only_existing=True, include_views=False)
        tables = sorted(set(names) - FILLED_BY_MIGRATE)
        if connection.vendor == "postgresql":
            tables = _written_to(connection, tables)
        # CASCADE for the tables that refer to these: TRUNCATE wants them named even when they are empty.
        sql = connection.ops.sql_flush(no_style(), tables, allow_cascade=connection.vendor == "postgresql")
        connection.ops.execute_sql_flush(sql)


def _written_to(connection: BaseDatabaseWrapper, tables: list[str]) -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute(WRITTEN_TO, [[connection.ops.quote_name(table) for table in tables]])
        return [name for (name,) in cursor.fetchall()]
