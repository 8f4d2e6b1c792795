"""What the modules of the store share: the table, and small differences between the databases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import DatabaseError, InterfaceError, connections

from inbox.models import InboxMessage
from outbox.kernel.clock import now_after

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

TABLE = InboxMessage._meta.db_table


def is_postgresql(connection: BaseDatabaseWrapper) -> bool:
    return connection.vendor == "postgresql"


def now(connection: BaseDatabaseWrapper) -> str:
    """The database's clock at this statement, for SQL written by hand."""
    # Adding nothing to it would cost PostgreSQL as much as a tenth of the statement.
    return "statement_timestamp()" if is_postgresql(connection) else now_after(connection).replace("%s", "0")


def is_reachable(alias: str) -> bool:
    """Does the database answer on a new connection?"""
    connection = connections[alias]
    try:
        connection.close()
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except (DatabaseError, InterfaceError):
        connection.close()
        return False
    return True
