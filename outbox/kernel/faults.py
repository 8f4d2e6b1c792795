"""What kind of failure is this database error?

Four answers matter. *Collisions* (serialization failure, deadlock, lock timeout, SQLite's "database is locked") ask for the
same transaction again at once. *Outages* (connection lost, server shutting down, a standby that takes no writes, a full disk or
memory) are nobody's attempt: wait for the server. A statement that was *canceled* took too long: ask for less. Everything else
is the fault of whoever ran the statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from django.db import DatabaseError, InterfaceError, OperationalError

SERIALIZATION_FAILURE, DEADLOCK, LOCK_TIMEOUT = "40001", "40P01", "55P03"
_CANCELED = "57014"
_COLLISIONS = {SERIALIZATION_FAILURE, DEADLOCK, LOCK_TIMEOUT}
_READ_ONLY, _RESOURCES, _SYSTEM = "25006", "53...", "58..."
_OUTAGE = re.compile(rf"08...|57P0[1-5]|25P03|{_READ_ONLY}|{_RESOURCES}|{_SYSTEM}")
_LOST = re.compile(r"connection|terminat|server closed|SSL|EOF|could not receive|could not send", re.IGNORECASE)


def is_collision(error: BaseException) -> bool:
    """Two transactions got in each other's way; running this one again is the documented answer."""
    return any(getattr(link, "sqlstate", None) in _COLLISIONS or _is_sqlite_busy(link) for link in _chain(error))


def is_lock_timeout(error: BaseException) -> bool:
    """A collision with a transaction that does not end."""
    return any(getattr(link, "sqlstate", None) == LOCK_TIMEOUT for link in _chain(error))


def is_outage(error: BaseException) -> bool:
    """The database went away underneath us, or ended our transaction because we were away.

    Its SQLSTATE says so; a statement that never reached the server carries none, and then only the text is left.
    """
    for link in _chain(error):
        sqlstate = getattr(link, "sqlstate", None)
        if sqlstate is not None:
            return bool(_OUTAGE.fullmatch(sqlstate))
    lost = isinstance(error, OperationalError | InterfaceError) and bool(_LOST.search(str(error)))
    return lost and not _is_sqlite_busy(error)


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
