"""The connections of a long-lived process, and how long a transaction on one waits for a lock."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, InterfaceError, connections, router
from django.db.models import Model

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger(__name__)


def is_postgresql(connection: BaseDatabaseWrapper) -> bool:
    return connection.vendor == "postgresql"


@contextmanager
def lock_timeout(alias: str, span: timedelta) -> Iterator[None]:
    """Bound every wait for a lock inside the open transaction, on PostgreSQL; the transaction's own bound comes back after.

    Also when the block fails, unless the database has refused a statement: then nothing can be set before the savepoint or
    transaction around it is rolled back, and that brings it back as well.
    """
    connection = connections[alias]
    if connection.vendor != "postgresql":
        yield
        return
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('lock_timeout')")
        (before,) = cursor.fetchone()
        cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{int(span.total_seconds() * 1000)}ms"])
        try:
            yield
        finally:
            if not _has_failed(connection):
                cursor.execute("SELECT set_config('lock_timeout', %s, true)", [before])


def with_table(model: type[Model], aliases: Collection[str] | None = None) -> tuple[list[str], list[str]]:
    """Those of `aliases` (None: of all) whose database has the table of `model`, and those that do not answer."""
    having, away = [], []
    for alias in connections if aliases is None else aliases:
        try:
            if router.allow_migrate_model(alias, model) and _has_table(alias, model):
                having.append(alias)
        except (DatabaseError, InterfaceError):
            away.append(alias)
    return having, away


def _has_table(alias: str, model: type[Model]) -> bool:
    with connections[alias].cursor() as cursor:
        return model._meta.db_table in connections[alias].introspection.table_names(cursor)


def leave_pools() -> None:
    """For a worker process, before it begins: from here on it connects without Django's connection pool.

    A pool lends connections to more threads than there are connections. Each thread of a worker keeps the one it has, and the
    thread that extends leases or leases tokens comes last: it would wait for `timeout` (30 s) in vain, again and again.
    """
    pooled: list[Any] = [connection for connection in connections.all() if connection.settings_dict["OPTIONS"].get("pool")]
    for connection in pooled:
        if connection.vendor == "postgresql" and not connection.in_atomic_block:
            connection.close()
            connection.close_pool()
            # The entry of the alias, for all threads. A new dict, because entries may share one.
            given = connection.settings_dict
            given["OPTIONS"] = {name: value for name, value in given["OPTIONS"].items() if name != "pool"}
            logger.info("%r has a connection pool; this process connects without it, once for each thread.", connection.alias)


def drop_unusable_connections() -> None:
    """Before each piece of work of a long-lived process, outside transactions: what a web process does between requests.

    Django's `close_old_connections` takes CONN_MAX_AGE = 0, its default, for "close now". Here there is no request to end, and
    a new connection for every message costs more than handling it.
    """
    for connection in connections.all(initialized_only=True):
        if connection.connection is None or connection.in_atomic_block:
            continue
        if not connection.autocommit or has_begun(connection):
            # Left behind by somebody's set_autocommit(False) or BEGIN: on such a connection nothing is ever committed.
            connection.close()
        elif connection.settings_dict["CONN_MAX_AGE"]:
            connection.close_if_unusable_or_obsolete()
        elif connection.errors_occurred:
            if connection.is_usable():
                connection.errors_occurred = False
            else:
                connection.close()


def has_begun(connection: Any) -> bool:
    """Is a connection, which is open, in a transaction? It is also asked about those that Django knows nothing of."""
    driver = connection.connection
    if connection.vendor == "sqlite":
        with suppress(sqlite3.ProgrammingError):  # closed behind Django's back
            return bool(driver.in_transaction)
    # Of psycopg 3 and of psycopg2; 0 is idle.
    return connection.vendor == "postgresql" and int(driver.info.transaction_status) != 0


def _has_failed(connection: Any) -> bool:
    """Has the transaction that is open on a PostgreSQL connection failed, or its connection been lost?"""
    driver = connection.connection
    # Of psycopg 3 and of psycopg2; 1 and 2 are active and in a transaction, 0 is idle.
    return driver is None or int(driver.info.transaction_status) not in {0, 1, 2}
