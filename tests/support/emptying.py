"""Empty a database after a test that commits.

Django's `flush` truncates every table and then creates all content types and permissions again, which takes longer than most
tests. Here only tables that have pages or rows are emptied, and those two keep theirs.
"""

from __future__ import annotations

from django.core.management.color import no_style
from django.db import OperationalError, connections
from django.test import TransactionTestCase

KEPT = {"django_migrations", "django_content_type", "auth_permission"}


def empty_after_each_test():
    """From now on, Django empties databases in this way."""
    TransactionTestCase._fixture_teardown = _fixture_teardown


def _fixture_teardown(test_case):
    for alias in test_case._databases_names(include_mirrors=False):
        connection = connections[alias]
        if tables := sorted(_used_tables(connection) - KEPT):
            _empty(connection, tables)


def _empty(connection, tables):
    """A process or thread that a test has stopped may still read: PostgreSQL ends one of the two when they deadlock."""
    for may_repeat in (True, True, False):
        try:
            connection.ops.execute_sql_flush(connection.ops.sql_flush(no_style(), tables, allow_cascade=True))
        except OperationalError as error:
            if not may_repeat or "deadlock" not in str(error):
                raise
        else:
            break


def _used_tables(connection):
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            names = connection.introspection.table_names(cursor)
            cursor.execute(" UNION ALL ".join(f"SELECT '{name}' WHERE EXISTS (SELECT 1 FROM \"{name}\")" for name in names))
        else:
            cursor.execute(
                "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace"
                " AND pg_relation_size(oid) > 0"
            )
        return {name for (name,) in cursor.fetchall()}
