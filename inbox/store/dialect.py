"""Shared by the modules of the store: the table, and small differences between the databases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, InterfaceError, connections

from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.days import DAY_OF_NOW, LIVE, Today
from exactly_once.sql.now import NOW, DatabaseTime
from inbox.models import InboxMessage, PausedHandler, Receipt

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

TABLE = InboxMessage._meta.db_table
RECEIPTS = Receipt._meta.db_table
IS_OPEN = f"day = {LIVE}"
"""The condition of messages that are not settled. With it, a statement reads only their partition."""
PAUSED_HANDLERS = PausedHandler._meta.db_table
LONGEST_LOCK_WAIT = timedelta(seconds=2)
BOUND = "WITH bound AS MATERIALIZED (SELECT current_setting('lock_timeout') AS before, set_config('lock_timeout', %s, true))"
"""Before a PostgreSQL statement FROM bound: it limits the wait for a lock, and UNBOUND in its result undoes that."""
UNBOUND = "set_config('lock_timeout', bound.before, true)"


def as_bound(longest_wait: timedelta) -> str:
    """The parameter of BOUND."""
    return f"{int(longest_wait.total_seconds() * 1000)}ms"


def binary(connection: BaseDatabaseWrapper) -> str:
    """The placeholder of bytes in a statement for `fetch_all`."""
    driver: Any = getattr(connection, "Database", None)
    return "%b" if is_postgresql(connection) and driver.__name__ == "psycopg" else "%s"


def adapted(connection: BaseDatabaseWrapper, value: Any) -> Any:
    """A value of a row as a parameter."""
    return connection.ops.adapt_datetimefield_value(value) if isinstance(value, datetime) else value


def fetch_all(connection: BaseDatabaseWrapper, sql: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Execute a statement with large parameters, which are sent separately and unescaped; its rows.

    Django's cursor interpolates them into the statement as text: several copies of a body, each of twice its size. It is still
    used when statements are being watched.
    """
    connection.ensure_connection()
    if binary(connection) == "%s" or connection.queries_logged or connection.execute_wrappers:
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return list(cursor.fetchall())
    from psycopg import Cursor  # noqa: PLC0415 - an extra

    connection.validate_no_broken_transaction()
    with connection.wrap_database_errors, Cursor(connection.connection) as cursor:
        cursor.execute(sql, parameters)
        return cursor.fetchall()


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


def assignments(columns: Mapping[str, Any], vendor: str) -> str:
    """The columns of a transition, for the SET of a statement that is written by hand."""
    return ", ".join(f"{column} = {_as_sql(value, vendor)}" for column, value in columns.items())


def _as_sql(value: Any, vendor: str) -> str:
    if isinstance(value, DatabaseTime | Today):
        return (NOW if isinstance(value, DatabaseTime) else DAY_OF_NOW)[vendor]
    return "NULL" if value is None else f"'{value}'"
