"""The connections of a long-lived process, the limits of transactions, and the way of a statement to the driver.

A project may put code of its own in between: a backend that sets `search_path` with each cursor (tenants by schema), a debug
toolbar or a tracer that patches a connection or Django's cursors, a pool that wraps the driver's connections. Then every
statement must go through `connection.cursor()`. A connection can be patched at any time, so `is_direct` is asked before each
statement.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import DatabaseError, InterfaceError, connections, router, transaction
from django.db.backends import utils
from django.db.backends.signals import connection_created
from django.db.models import Model

from exactly_once.process.logs import escaping_logger

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

logger = escaping_logger(__name__)

LONGEST_IDLE = timedelta(seconds=10)
"""The server then ends the transaction of a frozen process that has decided something."""
TIMEOUTS = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
"""Options of libpq for a network that drops packets."""
_OF_THE_SERVER = {
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "15000",
}
"""Settings of PostgreSQL for the same."""
READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; "
"""A transaction's first statement."""
_View = TypeVar("_View", bound=Callable[..., Any])
# A function that is not a method was set on the instance, and has no __func__.
_of_connection = attrgetter(
    "cursor.__func__", "_cursor.__func__", "_prepare_cursor.__func__", "make_cursor.__func__", "create_cursor.__func__"
)
_of_cursors = attrgetter(
    "CursorWrapper", "CursorWrapper.execute", "CursorWrapper._execute_with_wrappers", "CursorWrapper._execute"
)
_of_driver = attrgetter("cursor.__func__", "cursor_factory", "cursor_factory.execute")
_OWN = {"django", "psycopg"}
_seen: set[tuple[Any, ...]] = set()
"""The ways that lead through Django and psycopg only. The others may refer to a request, and are not kept."""


class ProjectsStatements:
    """An execute wrapper that watches what a project's code executes: ours need not pass it."""


def is_postgresql(connection: BaseDatabaseWrapper) -> bool:
    return connection.vendor == "postgresql"


def fetch(connection: BaseDatabaseWrapper, sql: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None) -> list[Any]:
    """The rows of a statement."""
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        rows: list[Any] = cursor.fetchall()
    return rows


def execute(connection: BaseDatabaseWrapper, sql: str, parameters: Sequence[Any] | None = None) -> int:
    """Execute a statement; the number of its rows."""
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return int(cursor.rowcount)


def is_outermost(connection: BaseDatabaseWrapper) -> bool:
    """Is the open transaction our own, not a savepoint inside a caller's?"""
    return len(connection.atomic_blocks) == 1


def set_local(**limits: timedelta) -> str:
    """The statements that set these limits of PostgreSQL for the open transaction."""
    return "".join(f"SET LOCAL {name} = {int(limit.total_seconds() * 1000)}; " for name, limit in limits.items())


def is_inside_a_transaction(alias: str) -> bool:
    """Is there an `atomic()` on this connection, other than that of a test case? As Django's atomic(durable=True) asks.

    Under django.test.TestCase everything is inside a transaction of the test; only one that the code under test opened counts,
    so that a missing atomic() fails in the tests and not in production.
    """
    return any(not getattr(block, "_from_testcase", False) for block in connections[alias].atomic_blocks)


@contextmanager
def decision_transaction(alias: str, longest_idle: timedelta = LONGEST_IDLE) -> Iterator[None]:
    """The transaction of an operator's decision and its audit entry, or of a day of history: READ COMMITTED in any project.

    The server ends it if this process is frozen, because others wait for its locks. Nested in another transaction it is a
    savepoint, with the settings of that.
    """
    with transaction.atomic(using=alias):
        connection = connections[alias]
        if is_postgresql(connection) and is_outermost(connection):
            execute(connection, READ_COMMITTED + set_local(idle_in_transaction_session_timeout=longest_idle))
        yield


def without_atomic_requests(view: _View) -> _View:
    """A view whose decisions have transactions of their own, whatever ATOMIC_REQUESTS is."""
    for alias in connections:
        view = transaction.non_atomic_requests(alias)(view)
    return view


@contextmanager
def lock_timeout(alias: str, duration: timedelta) -> Iterator[None]:
    """Set PostgreSQL's lock_timeout for the block, inside the open transaction, and restore it afterwards.

    It is restored also if the block raises. After a failed statement PostgreSQL accepts no SET; the rollback of the enclosing
    savepoint or transaction restores it then.
    """
    connection = connections[alias]
    if connection.vendor != "postgresql":
        yield
        return
    with connection.cursor() as cursor:
        cursor.execute(
            "WITH present AS MATERIALIZED (SELECT current_setting('lock_timeout') AS value) "
            "SELECT value, set_config('lock_timeout', %s, true) FROM present",
            [f"{int(duration.total_seconds() * 1000)}ms"],
        )
        before, _now = cursor.fetchone()
        try:
            yield
        finally:
            if not _has_failed(connection):
                cursor.execute("SELECT set_config('lock_timeout', %s, true)", [before])


def with_table(model: type[Model], aliases: Collection[str] | None = None) -> tuple[list[str], list[str]]:
    """The `aliases` (None: all) whose database has the table of `model`, and those whose database is unavailable."""
    having, unavailable = [], []
    for alias in connections if aliases is None else aliases:
        try:
            is_given = connections[alias].vendor != "unknown"  # not DATABASES["default"] = {}
            if is_given and router.allow_migrate_model(alias, model) and _has_table(alias, model):
                having.append(alias)
        except (DatabaseError, InterfaceError):
            unavailable.append(alias)
    return having, unavailable


def _has_table(alias: str, model: type[Model]) -> bool:
    with connections[alias].cursor() as cursor:
        return model._meta.db_table in connections[alias].introspection.table_names(cursor)


def leave_pools() -> None:
    """Make this worker process connect without Django's connection pool. Call it before the work begins.

    A pool serves more threads than it has connections. Each thread of a worker keeps its connection, and the thread that
    extends leases or leases tokens asks last: each time it would wait for `timeout` (30 s) and get none.
    """
    pooled: list[Any] = [connection for connection in connections.all() if connection.settings_dict["OPTIONS"].get("pool")]
    for connection in pooled:
        if connection.vendor == "postgresql" and not connection.in_atomic_block:
            connection.close()
            connection.close_pool()
            # The settings of the alias, for all threads. A new dict, because aliases may share one.
            given = connection.settings_dict
            given["OPTIONS"] = {name: value for name, value in given["OPTIONS"].items() if name != "pool"}
            logger.info(
                "Database %r has a connection pool; this process does not use it and opens one connection per thread.",
                connection.alias,
            )


def own_connections(application: str) -> None:
    """Let this process connect to PostgreSQL under its own name, and with the timeouts of `TIMEOUTS`, on both sides.

    Operators see the name in `pg_stat_activity`. It is libpq's fallback: a name in OPTIONS, PGAPPNAME or a service file is used
    instead. Timeouts in OPTIONS are used instead, too, and those of a service file. Call it before the work begins.
    """
    for connection in connections.all():
        if is_postgresql(connection):
            given = connection.settings_dict["OPTIONS"]
            timeouts = {} if "service" in given or "PGSERVICE" in os.environ else TIMEOUTS
            if "PGCONNECT_TIMEOUT" in os.environ:
                timeouts = {name: value for name, value in timeouts.items() if name != "connect_timeout"}
            connection.settings_dict["OPTIONS"] = {"fallback_application_name": application, **timeouts, **given}
    connection_created.connect(_watch_client)


def _watch_client(connection: Any, **signal: Any) -> None:
    """Let the server of a new session notice that this host has vanished: else it keeps its locks for two hours.

    Settings of the project, the role or the server stay. Behind a pooler nothing is set: the session is not ours alone.
    """
    if is_postgresql(connection):
        sql = (
            "SELECT set_config(name, CAST(%s AS json) ->> name, false) FROM pg_settings "
            "WHERE name = ANY(%s) AND source = 'default' AND pg_backend_pid() = %s"
        )
        fetch(connection, sql, [json.dumps(_OF_THE_SERVER), [*_OF_THE_SERVER], connection.connection.info.backend_pid])


def outlives_its_client(alias: str) -> bool:
    """Does the server keep a transaction whose client's host has vanished? Behind a pooler it does not notice that."""
    connection: Any = connections[alias]
    if not is_postgresql(connection):
        return False
    connection.ensure_connection()
    sql = "SELECT pg_backend_pid() <> %s AND current_setting('idle_in_transaction_session_timeout') = '0'"
    return fetch(connection, sql, [connection.connection.info.backend_pid]) == [(True,)]


def drop_unusable_connections(*, unchecked: str = "") -> None:
    """Close unusable connections, as a web process does between requests. Call it before each work item, outside transactions.

    Django's `close_old_connections` closes every connection if CONN_MAX_AGE is 0, the default. In a long-lived process a new
    connection for every message would cost more than handling the message.

    Args:
        unchecked: the alias whose work begins with a statement that is run again on a new connection if this one is lost, so
            that CONN_HEALTH_CHECKS need not send a query before it.
    """
    connection: Any
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block:
            continue
        # Django keeps the last error of a transaction and names it as the cause of any later TransactionManagementError, so an
        # outage that has ended would excuse every handler that breaks its transaction.
        connection.rollback_exc = None
        if connection.connection is None:
            continue
        if not connection.autocommit or has_begun(connection):
            # User code left it after set_autocommit(False) or BEGIN: nothing on such a connection would be committed.
            connection.close()
        elif connection.settings_dict["CONN_MAX_AGE"]:
            connection.close_if_unusable_or_obsolete()
            if connection.alias == unchecked:
                connection.health_check_done = True
        elif connection.errors_occurred:
            if connection.is_usable():
                connection.errors_occurred = False
            else:
                connection.close()


def has_begun(connection: Any) -> bool:
    """Is an open connection in a transaction, including one that Django does not know of?"""
    driver = connection.connection
    if connection.vendor == "sqlite":
        with suppress(sqlite3.ProgrammingError):  # closed without Django's knowledge
            return bool(driver.in_transaction)
    # psycopg 3 and psycopg2: 0 is idle.
    return connection.vendor == "postgresql" and int(driver.info.transaction_status) != 0


def _has_failed(connection: Any) -> bool:
    """Has the open transaction of a PostgreSQL connection failed, or was the connection lost?"""
    driver = connection.connection
    # psycopg 3 and psycopg2: 0 is idle, 1 is active, 2 is in a transaction.
    return driver is None or int(driver.info.transaction_status) not in {0, 1, 2}


def is_direct(connection: BaseDatabaseWrapper) -> bool:
    """May a statement of PostgreSQL bypass Django's cursor? It connects if necessary.

    Not if the statement would be logged or wrapped, or if the project replaces any function on its way to the driver.
    """
    wrappers: list[Any] = connection.execute_wrappers
    if connection.queries_logged or (wrappers and not all(isinstance(one, ProjectsStatements) for one in wrappers)):
        return False
    connection.ensure_connection()
    raw: Any = connection.connection
    try:
        way = (*_of_connection(connection), *_of_cursors(utils), *_of_driver(raw))
        if raw.pgconn.pipeline_status:  # libpq's plain functions fail in the project's pipeline
            return False
    except AttributeError:  # also psycopg 2
        return False
    if way not in _seen:
        if not all(map(_is_own, way)):
            return False
        _seen.add(way)
    return True


def _is_own(way: Any) -> bool:
    """Is the function or the class, with all that a decorator of it calls, defined in Django or psycopg?

    The name of a function's module does not say so, because decorators copy it; its globals do.
    """
    if isinstance(way, type):
        return _package(way.__module__) in _OWN
    if not isinstance(way, FunctionType) or _package(way.__globals__["__name__"]) not in _OWN:
        return False
    return not hasattr(way, "__wrapped__") or _is_own(way.__wrapped__)


def _package(module: str) -> str:
    return module.partition(".")[0]
