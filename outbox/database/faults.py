"""What kind of failure is this database error?

Four answers matter. *Collisions* (serialization failure, deadlock, lock timeout, SQLite's "database is locked") ask for the
same transaction again at once. *Outages* (connection lost, server shutting down, a standby that takes no writes, a full disk or
memory) are nobody's attempt: wait for the server. A statement that was *canceled* took too long: ask for less. Everything else
is the fault of whoever ran the statement. When that was one of our own, only its values can be to blame, or the database: a
missing table or right is an unavailable database then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from django.db import DEFAULT_DB_ALIAS, DatabaseError, DataError, IntegrityError, InterfaceError, OperationalError
from django.db.transaction import TransactionManagementError

SERIALIZATION_FAILURE, DEADLOCK, LOCK_TIMEOUT = "40001", "40P01", "55P03"
_CANCELED = "57014"
_COLLISIONS = {SERIALIZATION_FAILURE, DEADLOCK, LOCK_TIMEOUT}
_READ_ONLY, _RESOURCES, _SYSTEM = "25006", "53...", "58..."
_LOST_SESSION = re.compile(r"08...|57P0[1-5]|25P03")
_OUTAGE = re.compile(rf"{_LOST_SESSION.pattern}|{_READ_ONLY}|{_RESOURCES}|{_SYSTEM}")
_LIMIT_OF_A_VALUE = "54"
_SCHEMA_DIFFERS = re.compile(r"23502|NOT NULL constraint failed.*")  # a column that this version does not write
UNDEFINED_TABLE = "42P01"
_REMEDIES = (
    ("42P01|42703|23502", "Run `python manage.py migrate{database}`."),
    ("42501", "Grant the user of DATABASES[{alias!r}] SELECT, INSERT, UPDATE, DELETE on the tables, USAGE on sequences."),
    (_READ_ONLY, "It is a standby or read-only; point DATABASES[{alias!r}] at the primary, or make it writable."),
    ("53100", "Free disk space on its server."),
    ("53200", "Free memory on its server."),
    ("53300", "Raise its max_connections, or run fewer processes."),
    (_SYSTEM, "Its server reports an I/O or system error; see the server's log."),
)
"""SQLSTATEs as patterns, and what an operator does about them."""
_LOST = re.compile(r"connection|terminat|server closed|SSL|EOF|could not receive|could not send", re.IGNORECASE)


def is_collision(error: BaseException) -> bool:
    """Two transactions got in each other's way; running this one again is the documented answer."""
    return any(getattr(link, "sqlstate", None) in _COLLISIONS or _is_sqlite_busy(link) for link in _chain(error))


def is_lock_timeout(error: BaseException) -> bool:
    """A collision with a transaction that does not end."""
    return any(getattr(link, "sqlstate", None) == LOCK_TIMEOUT for link in _chain(error))


def is_outage(error: BaseException) -> bool:
    """The database became unavailable underneath us, or ended our transaction because we were frozen.

    Its SQLSTATE says so; a statement that never reached the server carries none, and then only the text is left.
    """
    return _says(error, _OUTAGE)


def is_lost(error: BaseException) -> bool:
    """The session has ended: the server or the network closed it, or it could not be opened."""
    return _says(error, _LOST_SESSION)


def is_about_values(error: BaseException) -> bool:
    """The values of a statement are to blame: another row may pass. 22xxx, 23xxx and 54xxx."""
    sqlstate = sqlstate_of(error)
    if _SCHEMA_DIFFERS.fullmatch(sqlstate or str(error)):
        return False
    return isinstance(error, DataError | IntegrityError) or sqlstate.startswith(_LIMIT_OF_A_VALUE)


def may_be_of_a_row(error: BaseException) -> bool:
    """May the same statement succeed for other rows? A full disk or a missing right is met by one row only, at times."""
    if isinstance(error, TransactionManagementError) or sqlstate_of(error) == _READ_ONLY:
        return False
    return isinstance(error, DatabaseError) and not (is_collision(error) or is_lost(error))


def sqlstate_of(error: BaseException) -> str:
    """What PostgreSQL called it, or "" when the statement did not reach it."""
    return next(filter(None, (getattr(link, "sqlstate", None) for link in _chain(error))), "")


def remedy(error: BaseException, alias: str) -> str:
    """What an operator does about a database that cannot store, or "" when only the error itself can say it."""
    database = "" if alias == DEFAULT_DB_ALIAS else f" --database {alias}"
    if str(error).startswith(("no such table", "no such column")):  # SQLite has no SQLSTATE
        return _REMEDIES[0][1].format(database=database)
    found = (text for pattern, text in _REMEDIES if re.fullmatch(pattern, sqlstate_of(error)))
    return next(found, "").format(alias=alias, database=database)


def _says(error: BaseException, sqlstates: re.Pattern[str]) -> bool:
    if sqlstate := sqlstate_of(error):
        return bool(sqlstates.fullmatch(sqlstate))
    # A statement that never reached the server. SQLite has none to lose.
    lost = isinstance(error, OperationalError | InterfaceError) and bool(_LOST.search(str(error)))
    return lost and not any(hasattr(link, "sqlite_errorname") for link in _chain(error))


def is_canceled(error: BaseException) -> bool:
    """The server ended a statement, because of `statement_timeout` or at an operator's request."""
    return any(getattr(link, "sqlstate", None) == _CANCELED for link in _chain(error))


def why_unavailable(error: BaseException, alias: str) -> str:
    """What to log of an outage: the database's words, or what is wrong and what to do, where that is known."""
    if any(getattr(link, "sqlstate", None) == _READ_ONLY for link in _chain(error)):
        return f"it is a standby or read-only; point DATABASES[{alias!r}] at the primary, or make it writable"
    return str(error)


def _is_sqlite_busy(error: BaseException) -> bool:
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED")) or (
        isinstance(error, OperationalError) and str(error).startswith(("database is locked", "database table is locked"))
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    # Django's wrapper carries the driver's error as its cause; a handler's own `raise … from` may wrap it again, and then
    # the handler has spoken and the database has not.
    while isinstance(link, DatabaseError | InterfaceError) or (link is not None and hasattr(link, "sqlstate")):
        yield link
        link = link.__cause__
    if link is not None and hasattr(link, "sqlite_errorname"):
        yield link
