"""Classify database errors.

After a *collision* (serialization failure, deadlock, lock timeout, SQLite's "database is locked") the caller runs the same
transaction again at once. During an *outage* (connection lost, server shutting down, a read-only standby, a full disk or
memory) it waits and counts no attempt. A *canceled* statement took too long: the caller asks for less. Any other error is the
fault of the code that ran the statement. For a statement of this project only its values or the database can be the cause; a
missing table or privilege then counts as an unavailable database.

What decides, in this order: whether a connection was being opened, the SQLSTATE and the severity, the class of the error, its
text. An error whose cause is not known is an outage, because an outage blames no message.
"""

import inspect
import re
from collections.abc import Iterator
from traceback import walk_tb
from typing import Any, TypeGuard

from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, DatabaseError, DataError, IntegrityError, InterfaceError, OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.db.transaction import TransactionManagementError
from django.db.utils import DatabaseErrorWrapper

from exactly_once.sql.partitions import DEFAULT_SUFFIX

SERIALIZATION_FAILURE, DEADLOCK, LOCK_TIMEOUT = "40001", "40P01", "55P03"
_CANCELED = "57014"
CHECK_VIOLATION, INSUFFICIENT_PRIVILEGE, DUPLICATE_TABLE = "23514", "42501", "42P07"
_SNAPSHOT_TOO_OLD = "72000"
_COLLISIONS = {SERIALIZATION_FAILURE, DEADLOCK, LOCK_TIMEOUT, _SNAPSHOT_TOO_OLD}
_READ_ONLY, _RESOURCES, _SYSTEM = "25006", "53...", "58..."
_LOST_SESSION = re.compile(r"08...|28...|57P0.|25P0[34]")
_OUTAGE = re.compile(rf"{_LOST_SESSION.pattern}|{_READ_ONLY}|{_RESOURCES}|{_SYSTEM}|40003|57000|F0...|HV00N")
"""Also: completion unknown, operator intervention, the server's files, a foreign server that cannot be reached."""
_OUTAGE_OF_SQLITE = re.compile(r"SQLITE_(FULL|IOERR|CANTOPEN|READONLY|NOMEM|PROTOCOL)")
_LIMIT_OF_A_VALUE = "54"
_LIMITS_OF_A_STATEMENT = {"53200", "53400"}
"""Memory, the table of locks, and settings such as temp_file_limit."""
_SCHEMA_DIFFERS = re.compile(r"23502|NOT NULL constraint failed.*")  # this version does not write the column
UNDEFINED_TABLE = "42P01"
_REMEDIES = (
    ("42P01|42703|23502", "Run `python manage.py migrate{database}`."),
    (
        "42501",
        "Grant the user of DATABASES[{alias!r}] SELECT, INSERT, UPDATE, DELETE on tables and SELECT, USAGE on sequences.",
    ),
    (_READ_ONLY, "It is a standby or read-only; point DATABASES[{alias!r}] at the primary, or make it writable."),
    ("53100", "Free disk space on its server."),
    ("53200", "Free memory on its server."),
    ("53300", "Raise its max_connections, or run fewer processes."),
    (_SYSTEM, "Its server reports an I/O or system error; see the server's log."),
)
"""Patterns of SQLSTATEs, and the operator's remedy."""
_OF_THE_STATEMENT = re.compile(
    r"number of parameters|command string is a null|in progress|pipeline mode|COPY|row mode|rows mode", re.IGNORECASE
)
"""Of libpq's errors without a SQLSTATE, those of the program that uses it."""
_LOST = re.compile(
    r"connect|terminat|server closed|SSL|EOF|could not receive|could not send|resolve host|host name|timed out|^\(2006",
    re.IGNORECASE,
)
_CONNECT = inspect.unwrap(BaseDatabaseWrapper.connect).__code__


def is_collision(error: BaseException) -> bool:
    """Did two transactions conflict? PostgreSQL's documentation says to run this one again."""
    return any(_sqlstate(link) in _COLLISIONS or _is_sqlite_busy(link) or _is_misrouted(link) for link in _chain(error))


def _is_misrouted(error: BaseException) -> bool:
    """Was the row on its way into the default partition of history while that of its day was made? The next try finds that.

    PostgreSQL reports it as the violation of a CHECK constraint without a name, like any row that its partition does not take.
    """
    if _sqlstate(error) != CHECK_VIOLATION:
        return False
    found: Any = getattr(error, "diag", None)
    return found.constraint_name is None and (found.table_name or "").endswith(DEFAULT_SUFFIX)


def is_lock_timeout(error: BaseException) -> bool:
    """Did another transaction hold a lock for longer than lock_timeout?"""
    return any(_sqlstate(link) == LOCK_TIMEOUT for link in _chain(error))


def is_outage(error: BaseException) -> bool:
    """Is the database unavailable, or did it end the transaction of a frozen process?"""
    of_sqlite = (_OUTAGE_OF_SQLITE.match(getattr(link, "sqlite_errorname", None) or "") for link in _chain(error))
    return _says(error, _OUTAGE) or any(of_sqlite)


def is_lost(error: BaseException) -> bool:
    """Has the session ended? The server or the network closed it, or it could not be opened."""
    return _says(error, _LOST_SESSION)


def is_outage_of_its_server(error: BaseException) -> bool:
    """Is its server unavailable, or without disk or connections? Not if the statement needs too much memory or many locks."""
    if not isinstance(error, OperationalError | InterfaceError):
        return False
    return is_outage(error) and sqlstate_of(error) not in _LIMITS_OF_A_STATEMENT


def alias_of(error: BaseException) -> str:
    """The alias of the connection that raised the error; "" if it is not one of Django's."""
    found = ""
    for frame, _ in walk_tb(error.__traceback__):
        caller: Any = frame.f_locals.get("self")
        if isinstance(caller, CursorWrapper | DatabaseErrorWrapper):
            caller = getattr(caller, "db", None) or getattr(caller, "wrapper", None)
        if isinstance(caller, BaseDatabaseWrapper):
            found = caller.alias
    return found


def is_about_values(error: BaseException) -> bool:
    """Did the values of the statement cause the error (22xxx, 23xxx, 54xxx)? It may succeed for another row."""
    sqlstate = sqlstate_of(error)
    if _SCHEMA_DIFFERS.fullmatch(sqlstate or str(error)):
        return False
    return isinstance(error, DataError | IntegrityError) or sqlstate.startswith(_LIMIT_OF_A_VALUE)


def may_be_of_a_row(error: BaseException) -> bool:
    """May the same statement succeed for other rows? Even a full disk or a missing privilege may affect one row only."""
    if isinstance(error, TransactionManagementError) or sqlstate_of(error) == _READ_ONLY:
        return False
    return isinstance(error, DatabaseError) and not (is_collision(error) or is_lost(error))


def sqlstate_of(error: BaseException) -> str:
    """PostgreSQL's SQLSTATE, or "" if the statement did not reach it."""
    return next(filter(None, map(_sqlstate, _chain(error))), "")


def diagnosis_of(error: BaseException) -> Any:
    """What PostgreSQL says about the error besides its text, such as the names of the table and the constraint, or None."""
    return next(filter(None, (getattr(link, "diag", None) for link in _chain(error))), None)


def remedy(error: BaseException, alias: str) -> str:
    """The operator's remedy for a database that cannot store, or "" if none is known."""
    database = "" if alias == DEFAULT_DB_ALIAS else f" --database {alias}"
    if str(error).startswith(("no such table", "no such column")):  # SQLite has no SQLSTATE
        return _REMEDIES[0][1].format(database=database)
    found = (text for pattern, text in _REMEDIES if re.fullmatch(pattern, sqlstate_of(error)))
    return next(found, "").format(alias=alias, database=database)


def _says(error: BaseException, sqlstates: re.Pattern[str]) -> bool:
    if _failed_to_connect(error):
        return not is_collision(error)
    links = [*_chain(error)]
    if any(getattr(getattr(link, "diag", None), "severity_nonlocalized", None) in {"FATAL", "PANIC"} for link in links):
        return True
    if sqlstate := sqlstate_of(error):
        return bool(sqlstates.fullmatch(sqlstate))
    # libpq made the error, or the driver. SQLite has no server.
    if any(hasattr(link, "sqlite_errorname") for link in links):
        return False
    if any(_is_of_postgresql(link) for link in links) and (isinstance(error, OperationalError) or type(error) is DatabaseError):
        return not _OF_THE_STATEMENT.search(str(error))
    return isinstance(error, OperationalError | InterfaceError) and bool(_LOST.search(str(error)))


def _failed_to_connect(error: BaseException) -> bool:
    """Was a connection being opened? The class of the error may be that of a pool, or of a service that issues passwords."""
    return not isinstance(error, ImproperlyConfigured) and any(
        frame.f_code is _CONNECT for frame, _ in walk_tb(error.__traceback__)
    )


def is_canceled(error: BaseException) -> bool:
    """Did the server cancel the statement, because of `statement_timeout` or an operator?"""
    return any(_sqlstate(link) == _CANCELED for link in _chain(error))


def _is_sqlite_busy(error: BaseException) -> bool:
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED")) or (
        isinstance(error, OperationalError) and str(error).startswith(("database is locked", "database table is locked"))
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    # Django's wrapper has the driver's error as its cause. A handler's own `raise … from` may wrap it again; that is the
    # handler's error, not the database's.
    while isinstance(link, DatabaseError | InterfaceError) or _is_of_postgresql(link):
        yield link
        link = link.__cause__
    if link is not None and hasattr(link, "sqlite_errorname"):
        yield link


def _is_of_postgresql(link: BaseException | None) -> TypeGuard[BaseException]:
    return hasattr(link, "sqlstate") or hasattr(link, "pgcode")


def _sqlstate(link: BaseException) -> str | None:
    """Of psycopg 3, or of psycopg2."""
    return getattr(link, "sqlstate", None) or getattr(link, "pgcode", None)
