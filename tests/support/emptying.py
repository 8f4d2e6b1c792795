"""Empty a database after a test that commits.

Django's `flush` truncates every table and then creates all content types and permissions again, which takes longer than most
tests. Here only tables that have pages or rows are emptied, and those two keep theirs.

PostgreSQL needs 15 ms of processor time to truncate one of our tables with its indexes, and a tenth of a millisecond to delete
its few rows. So a table is truncated only when it has become large, with rows that were deleted before.
"""

from django.core.management.color import no_style
from django.db import OperationalError, connections, transaction
from django.test import TransactionTestCase

KEPT = {"django_migrations", "django_content_type", "auth_permission"}
LARGE = 128 * 1024
"""Bytes, from which on a table is truncated."""


def empty_after_each_test():
    """From now on, Django empties databases in this way."""
    TransactionTestCase._fixture_teardown = _fixture_teardown


def _fixture_teardown(test_case):
    for alias in test_case._databases_names(include_mirrors=False):
        connection = connections[alias]
        sizes = {name: size for name, size in _used_tables(connection) if name not in KEPT}
        small = [name for name, size in sizes.items() if size < LARGE and _may_delete(connection)]
        _repeated(_delete, connection, small)
        _repeated(_truncate, connection, sorted(sizes.keys() - small))


def _repeated(empty, connection, tables):
    """A process or thread that a test has stopped may still read: PostgreSQL ends one of the two when they deadlock."""
    for may_repeat in (True, True, False) if tables else ():
        try:
            empty(connection, tables)
        except OperationalError as error:
            if not may_repeat or "deadlock" not in str(error):
                raise
        else:
            break


def _truncate(connection, tables):
    connection.ops.execute_sql_flush(connection.ops.sql_flush(no_style(), tables, allow_cascade=True))


def _may_delete(connection):
    """Whether the user can switch off triggers, and with them the foreign keys."""
    return connection.vendor == "postgresql" and connection.connection.info.parameter_status("is_superuser") == "on"


def _delete(connection, tables):
    """It waits, as TRUNCATE does, for the transactions that have written to the tables."""
    names = [connection.ops.quote_name(table) for table in tables]
    deletes = "; ".join(f"DELETE FROM {name}" for name in names)
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        cursor.execute(f"LOCK {', '.join(names)}; SET LOCAL session_replication_role = replica; {deletes}")


def _used_tables(connection):
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            names = connection.introspection.table_names(cursor)
            cursor.execute(" UNION ALL ".join(f"SELECT '{name}', 0 WHERE EXISTS (SELECT 1 FROM \"{name}\")" for name in names))
        else:
            cursor.execute(
                "SELECT relname, pg_relation_size(oid) + COALESCE(pg_relation_size(NULLIF(reltoastrelid, 0)), 0) FROM pg_class"
                " WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace AND pg_relation_size(oid) > 0"
                " ORDER BY relname"
            )
        return cursor.fetchall()
