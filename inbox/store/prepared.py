"""Statements that PostgreSQL parses and plans once for a connection instead of once for a message.

Django switches psycopg's own preparing off, for good reason: behind a proxy that pools transactions the next one may run on
another server process, where nothing is prepared. Such a proxy is seen by this: the process that answers is not the one that
greeted us. Then everything is sent as text.

They go through one cursor of the driver for each connection: making one of Django's takes as long as half the statement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db import OperationalError

from outbox.kernel.faults import SERIALIZATION_FAILURE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper

_MISSING, _EXISTS = "26000", "42P05"
_AT_HAND = "_inbox_prepared"


class StatementLost(OperationalError):
    """What is prepared on this connection is not what we know of. The transaction is over; run it again."""

    sqlstate = SERIALIZATION_FAILURE


@dataclass(slots=True)
class _AtHand:
    """What belongs to one connection of the driver; `cursor` is None when it leads through a proxy."""

    cursor: Any
    known: set[str]


class Prepared:
    """A statement with the types of its parameters. In `text` they are `$1`, `$2`, …."""

    def __init__(self, name: str, types: Sequence[str], text: str) -> None:
        self._name = f"inbox_{name}"
        self._prepare = f"PREPARE {self._name} ({', '.join(types)}) AS {text}"
        self._execute = f"EXECUTE {self._name} ({', '.join(['%s'] * len(types))})"

    def execute(self, connection: BaseDatabaseWrapper, parameters: Sequence[Any]) -> Any:
        """Run it in the open transaction; the driver's cursor with its result. Only when `is_usable`.

        Raises:
            StatementLost: see there.
        """
        at_hand = _at_hand(connection)
        with connection.wrap_database_errors:
            try:
                if self._name not in at_hand.known:
                    at_hand.cursor.execute(self._prepare)
                    at_hand.known.add(self._name)
                return at_hand.cursor.execute(self._execute, parameters)
            except Exception as error:
                sqlstate = getattr(error, "sqlstate", None)
                if sqlstate not in {_MISSING, _EXISTS}:
                    raise
                at_hand.known.discard(self._name)
                if sqlstate == _EXISTS:
                    # Somebody else's: a proxy after all, whose server processes change hands.
                    at_hand.cursor = None
                raise StatementLost(str(error)) from None


def is_usable(connection: BaseDatabaseWrapper) -> bool:
    """May prepared statements be used here? Not where somebody watches the statements, and not behind a proxy."""
    if connection.vendor != "postgresql" or connection.queries_logged or connection.execute_wrappers:
        return False
    connection.ensure_connection()
    return _at_hand(connection).cursor is not None


def _at_hand(connection: BaseDatabaseWrapper) -> _AtHand:
    raw: Any = connection.connection
    at_hand: _AtHand | None = getattr(raw, _AT_HAND, None)
    if at_hand is None:
        at_hand = _AtHand(_own_cursor(connection, raw), set())
        setattr(raw, _AT_HAND, at_hand)
    return at_hand


def _own_cursor(connection: BaseDatabaseWrapper, raw: Any) -> Any:
    if not hasattr(raw, "pgconn"):  # psycopg 2
        return None
    from psycopg import ClientCursor  # noqa: PLC0415 - an extra

    cursor: Any = ClientCursor(raw)
    with connection.wrap_database_errors:
        (answering,) = cursor.execute("SELECT pg_backend_pid()").fetchone()
    return cursor if answering == raw.info.backend_pid else None
