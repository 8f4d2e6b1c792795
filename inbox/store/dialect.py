"""Shared by the modules of the store: the table, and small differences between the databases."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from django.db import OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import JSONField

from exactly_once.sql.connections import execute, fetch, is_direct, is_postgresql
from exactly_once.sql.days import DAY_OF_NOW, LIVE, Today
from exactly_once.sql.faults import LOCK_TIMEOUT, sqlstate_of
from exactly_once.sql.now import NOW, DatabaseTime
from exactly_once.sql.prepared_statements import PreparedStatement, is_usable
from inbox.models import InboxMessage, PausedHandler, Receipt
from inbox.store.message_rows import ConcurrentDuplicate

TABLE = InboxMessage._meta.db_table
RECEIPTS = Receipt._meta.db_table
IS_OPEN = f"day = {LIVE}"
"""The condition of messages that are not settled. With it, a statement reads only their partition."""
PAUSED_HANDLERS = PausedHandler._meta.db_table
_FIELDS = InboxMessage._meta.concrete_fields
_NAMES = [field.attname for field in _FIELDS]
_JSON = [index for index, field in enumerate(_FIELDS) if isinstance(field, JSONField)]
LONGEST_LOCK_WAIT = timedelta(seconds=2)
SHORTEST_LOCK_WAIT = timedelta(milliseconds=10)
"""After it, another process is assumed to be handling the message."""
BOUND = "WITH bound AS MATERIALIZED (SELECT current_setting('lock_timeout') AS before, set_config('lock_timeout', %s, true))"
"""Before a PostgreSQL statement FROM bound: it limits the wait for a lock, and UNBOUND in its result undoes that."""
UNBOUND = "set_config('lock_timeout', bound.before, true)"


class _LockedMeansBusy(AbstractContextManager[object]):
    """A context: a statement that waits for a lock for longer than lock_timeout raises ConcurrentDuplicate."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OperationalError):
            raise_if_busy(error)


locked_means_busy = _LockedMeansBusy()


def raise_if_busy(error: OperationalError) -> None:
    """Raise ConcurrentDuplicate if the statement has waited for a lock for longer than lock_timeout."""
    if sqlstate_of(error) == LOCK_TIMEOUT:
        raise ConcurrentDuplicate from error


@lru_cache
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
    used where statements must go through it.
    """
    if binary(connection) == "%s" or not is_direct(connection):
        return fetch(connection, sql, parameters)
    from psycopg import Cursor  # noqa: PLC0415 - an extra

    connection.validate_no_broken_transaction()
    with connection.wrap_database_errors, Cursor(connection.connection) as cursor:
        cursor.execute(sql, parameters)
        return cursor.fetchall()


def run(
    statement: PreparedStatement, connection: BaseDatabaseWrapper, parameters: Sequence[Any], *, then: Sequence[bytes] = ()
) -> list[tuple[Any, ...]]:
    """The rows of a statement of PostgreSQL, which is sent as text where statements may not be prepared.

    Args:
        then: statements without parameters that follow it, in the same round trip where it is prepared.
    """
    if is_usable(connection):
        connection.validate_no_broken_transaction()
        return statement.fetch(connection, parameters, then=then)
    rows = fetch_all(connection, *statement.as_text(parameters, binary(connection)))
    for one in then:
        execute(connection, one.decode())
    return rows


def columns_of(table: str) -> str:
    """All columns of a message, for the RETURNING of a statement."""
    return ", ".join(f"{table}.{field.column}{'::text' if isinstance(field, JSONField) else ''}" for field in _FIELDS)


def message_of(alias: str, row: Sequence[Any]) -> InboxMessage:
    """The message whose columns, as in `columns_of`, are this row. The ORM would take longer than the statement."""
    values = [*row]
    for index in _JSON:
        values[index] = None if values[index] is None else json.loads(values[index])
    return InboxMessage.from_db(alias, _NAMES, values)


def is_reachable(alias: str) -> bool:
    """Does the database answer on a new connection?"""
    connection = connections[alias]
    try:
        connection.close()
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except Exception:  # noqa: BLE001 - a pool, or a service that issues passwords, has errors of its own
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
