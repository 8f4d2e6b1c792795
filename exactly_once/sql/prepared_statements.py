"""Prepared statements: PostgreSQL parses, and possibly plans, a statement once for many messages.

Django disables psycopg's own prepared statements, for a good reason: behind a proxy that pools transactions the next
transaction may run in another server process, which has not prepared the statement. This module detects such a proxy: the
answering process is not the one that opened the session. Then it prepares nothing, and statements are sent as text.

Statements go directly to libpq through the connection that psycopg documents for that purpose (`Connection.pgconn`). A cursor
and the adaptation of parameters with known types take longer than PostgreSQL takes to run the statement.
"""

from __future__ import annotations

import re
import select
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import DataError, OperationalError
from kombu.utils.compat import detect_environment

from exactly_once.sql.faults import SERIALIZATION_FAILURE, sqlstate_of

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_MISSING, _EXISTS = "26000", "42P05"
_AT_HAND, _ASKED = "_statements_at_hand", "_statements_asked_for"
_TEXT, _BINARY = 0, 1
_BEGIN, _COMMIT = b"BEGIN", b"COMMIT"
_BINARY_TYPES = {"bytea", "bytea[]"}
_OID_OF_BYTEA = 17
_PIPELINE_SYNC = 10
"""libpq's PGRES_PIPELINE_SYNC, the answer to a pipeline's end."""
_MOST_RUNS = 1000
_SELDOM_AT_MOST = 5
"""As psycopg's `prepare_threshold`."""
PLANNED_SINGLY = 5
"""`most_runs` of a statement that is planned for each run: PostgreSQL considers a generic plan only after five runs."""

_KEEPING_PLANS = {"enable_seqscan": "off", "enable_sort": "off", "jit": "off", "plan_cache_mode": "force_generic_plan"}
KEEP_PLANS = ", ".join(f"set_config('{name}', '{value}', true)" for name, value in _KEEPING_PLANS.items())
"""To be selected, for the transaction. The plans of its prepared statements are kept, and are right whatever the size of the
table, if only one index has the rows in the order that a statement wants: neither a sequential scan nor a sort replaces it."""


class StatementLost(OperationalError):
    """The prepared statements of this connection differ from those recorded. The transaction has failed; run it again."""

    sqlstate = SERIALIZATION_FAILURE


class StatementResult(NamedTuple):
    """PostgreSQL's answer.

    Attributes:
        rows: in PostgreSQL's text format.
        hit: the number of rows that the statement wrote or found.
    """

    rows: list[list[Any]]
    hit: int


@dataclass(slots=True)
class _AtHand:
    """The prepared statements of one driver connection."""

    may_prepare: bool
    runs: dict[bytes, int]


class PreparedStatement:
    """A statement with PostgreSQL's types of its parameters. In `text` the parameters are `$1`, `$2`, ….

    A value is text in PostgreSQL's format, bytes, a list of bytes, an instant, or an object whose `str` is such text.

    Args:
        most_runs: the statement is prepared again after this many runs. From the sixth run on PostgreSQL may keep a plan until
            the next ANALYZE. A plan from a nearly empty table scans the whole table, even after it has grown.
        returns_binary: `fetch` receives the values in PostgreSQL's binary format, which is faster for large ones. Not for
            columns of JSON and instants, which Django reads as text.
    """

    def __init__(
        self, name: str, types: Sequence[str], text: str, *, most_runs: int = _MOST_RUNS, returns_binary: bool = False
    ) -> None:
        self._most_runs = most_runs
        self._result_format = _BINARY if returns_binary else _TEXT
        self._name = name.encode()
        self.text, self.types = text, types
        self._prepare = f"PREPARE {name} ({', '.join(types)}) AS {text}".encode()
        self._formats = [_BINARY if kind in _BINARY_TYPES else _TEXT for kind in types]

    def as_text(self, parameters: Sequence[Any], binary: str = "%s") -> tuple[str, list[Any]]:
        """The statement with Django's placeholders, and its parameters, for a connection that may not prepare it.

        Args:
            binary: the placeholder of bytes.
        """
        given: list[Any] = []

        def place(found: re.Match[str]) -> str:
            number = int(found[1]) - 1
            given.append(parameters[number])
            return f"{binary if self.types[number] in _BINARY_TYPES else '%s'}::{self.types[number]}"

        return re.sub(r"\$(\d+)", place, self.text.replace("%", "%%")), given

    def execute(self, connection: BaseDatabaseWrapper, parameters: Sequence[Any]) -> StatementResult:
        """Run it, in the open transaction if there is one. Call it only if `is_usable`.

        Raises:
            StatementLost: see there.
            django.db.Error: PostgreSQL refused the statement, or the connection was lost.
        """
        (result,) = _run(connection, [(self, parameters)])
        rows: list[list[Any]] = []
        for row in range(result.ntuples):
            rows.append([])
            for column in range(result.nfields):
                value = result.get_value(row, column)
                rows[row].append(None if value is None else value.decode())
        return StatementResult(rows, result.command_tuples or 0)

    def execute_and_commit(
        self, connection: BaseDatabaseWrapper, parameters: Sequence[Any], *, before: Sequence[bytes] = ()
    ) -> int:
        """Run it as the last statement of the open transaction, and commit, in one round trip. If it fails, nothing commits.

        Django's own commit finds no open transaction then, and sends nothing.

        Args:
            before: statements to run before it.

        Returns:
            the number of rows that it wrote.

        Raises:
            StatementLost: see there.
            django.db.Error: the statement failed, and the transaction is still open; or the commit failed, and it is not.
        """
        (result,) = _run(connection, [(self, parameters)], before=before, commit=True)
        return result.command_tuples or 0

    def fetch(self, connection: BaseDatabaseWrapper, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        """As `execute`, but return rows as a psycopg cursor does; this is faster for many rows."""
        (result,) = _run(connection, [(self, parameters)])
        return _rows_of(connection, result)

    def fetch_after(self, connection: BaseDatabaseWrapper, script: str, parameters: Sequence[str]) -> list[tuple[Any, ...]]:
        """As `fetch`, after the statements of `script`, in the same round trip and transaction; see `execute_script`."""
        at_hand = _at_hand(connection)
        with connection.wrap_database_errors:
            try:
                self._prepared(connection.connection, at_hand, ())
                placeholders = ", ".join(["%s"] * len(parameters))
                return execute_script(connection, f"{script}; ", f"EXECUTE {self._name.decode()} ({placeholders})", parameters)
            except Exception as error:
                _raise_if_lost(error, [self], at_hand)
                raise

    def commit_and_fetch(
        self,
        connection: BaseDatabaseWrapper,
        parameters: Sequence[Any],
        following: PreparedStatement,
        its_parameters: Sequence[Any],
    ) -> list[tuple[Any, ...]]:
        """As `execute_and_commit`, with a second statement before the commit: what `following` returns."""
        _, found = _run(connection, [(self, parameters), (following, its_parameters)], commit=True)
        return _rows_of(connection, found)

    def _prepared(self, raw: Any, at_hand: _AtHand, parameters: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of libpq for one more run; prepare it if necessary."""
        if at_hand.runs.get(self._name, 0) >= self._most_runs:
            _checked(raw, [raw.pgconn.exec_(b"DEALLOCATE " + self._name)])
            del at_hand.runs[self._name]
        if self._name not in at_hand.runs:
            _checked(raw, [raw.pgconn.exec_(self._prepare)])
            at_hand.runs[self._name] = 0
        at_hand.runs[self._name] += 1
        return self._name, _adapted(parameters), self._formats, self._result_format

    def _forget_if_named(self, error: str, at_hand: _AtHand) -> None:
        if re.search(rf"\b{self._name.decode()}\b", error):
            at_hand.runs.pop(self._name, None)


def execute_script(
    connection: BaseDatabaseWrapper, script: str, last: str = "", parameters: Sequence[Any] = ()
) -> list[tuple[Any, ...]]:
    """Run statements without parameters in one round trip, in the open transaction; the rows of the last one.

    If the transaction has not begun on the server, it begins in the same round trip. Outside of `atomic()` the statements are
    a transaction of their own. Call it only if `is_usable`.

    Args:
        last: a statement with parameters, in Django's form, that follows.

    Raises:
        django.db.Error: one of them failed; those after it have not run.
    """
    raw: Any = connection.connection
    with connection.wrap_database_errors:
        if last:
            from psycopg import ClientCursor  # noqa: PLC0415 - an extra

            script += ClientCursor(raw).mogrify(last, parameters)
        begin = f"{_BEGIN.decode()}; " if _is_to_begin(raw) else ""
        (result,) = _checked(raw, [raw.pgconn.exec_(f"{begin}{script}".encode())])
        return _rows_of(connection, result)


def _run(
    connection: BaseDatabaseWrapper,
    runs: Sequence[tuple[PreparedStatement, Sequence[Any]]],
    *,
    before: Sequence[bytes] = (),
    commit: bool = False,
) -> list[Any]:
    """PostgreSQL's result of each statement."""
    at_hand = _at_hand(connection)
    raw: Any = connection.connection
    with connection.wrap_database_errors:
        try:
            given = []
            for statement, parameters in runs:
                given.append(statement._prepared(raw, at_hand, parameters))  # noqa: SLF001 - of this module
            begin = _is_to_begin(raw)
            if begin or commit or len(given) > 1:
                return _pipelined(raw, [_BEGIN, *before] if begin else before, given, [_COMMIT] if commit else [])
            return _checked(raw, [raw.pgconn.exec_prepared(*given[0])])
        except Exception as error:
            _raise_if_lost(error, [statement for statement, _ in runs], at_hand)
            raise


def _raise_if_lost(error: Exception, statements: Sequence[PreparedStatement], at_hand: _AtHand) -> None:
    sqlstate = sqlstate_of(error)
    if sqlstate in {_MISSING, _EXISTS}:
        for statement in statements:
            statement._forget_if_named(str(error), at_hand)  # noqa: SLF001 - of this module
        if sqlstate == _EXISTS:
            # Another client prepared it: there is a proxy, and it shares its server processes.
            at_hand.may_prepare = False
        raise StatementLost(str(error)) from None


def _rows_of(connection: BaseDatabaseWrapper, result: Any) -> list[tuple[Any, ...]]:
    from psycopg.adapt import Transformer  # noqa: PLC0415 - an extra

    loaders = Transformer(connection.connection)
    loaders.set_pgresult(result)
    return loaders.load_rows(0, result.ntuples, tuple)


def _adapted(parameters: Sequence[Any]) -> list[bytes | None]:
    adapted: list[bytes | None] = []
    for value in parameters:
        if value is None or isinstance(value, bytes):
            adapted.append(value)
        elif isinstance(value, list):
            adapted.append(_array(value))
        else:
            text = (value.isoformat() if isinstance(value, datetime) else str(value)).encode()
            if b"\0" in text:
                # libpq would end the text there.
                raise DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
            adapted.append(text)
    return adapted


def _array(values: Sequence[bytes]) -> bytes:
    """A `bytea[]` in PostgreSQL's binary format: dimensions, is any NULL, type, length, first index; then each element."""
    elements = (struct.pack("!i", len(value)) + value for value in values)
    return struct.pack("!5i", 1, 0, _OID_OF_BYTEA, len(values), 1) + b"".join(elements)


def _is_to_begin(raw: Any) -> bool:
    """Would psycopg begin a plain transaction with its next statement? One with settings of its own is begun here."""
    if raw.autocommit or int(raw.pgconn.transaction_status):
        return False
    if raw.isolation_level is raw.read_only is raw.deferrable is None:
        return True
    raw.execute("")  # takes no snapshot, so that the isolation level may still be set
    return False


def _pipelined(raw: Any, before: Sequence[bytes], prepared: Sequence[tuple[Any, ...]], after: Sequence[bytes]) -> list[Any]:
    """The results of prepared statements that are sent together with others; none runs after one that fails."""
    pgconn = raw.pgconn
    try:
        pgconn.enter_pipeline_mode()
        for statement in before:
            pgconn.send_query_params(statement, None)
        for one in prepared:
            pgconn.send_query_prepared(*one)
        for statement in after:
            pgconn.send_query_params(statement, None)
        pgconn.pipeline_sync()
        results = _results(pgconn)
        pgconn.exit_pipeline_mode()
    except BaseException:
        # What is still in flight would be taken for the answers of the next statement.
        raw.close()
        raise
    return _checked(raw, results)[len(before) : len(before) + len(prepared)]


def _results(pgconn: Any) -> list[Any]:
    """The results of a pipeline up to its end. PQgetResult itself would wait with Python's global lock held."""
    results: list[Any] = []
    while True:
        while (unsent := pgconn.flush()) or pgconn.is_busy():
            poll = select.poll()
            poll.register(pgconn.socket, select.POLLIN | (select.POLLOUT if unsent else 0))
            poll.poll()
            pgconn.consume_input()
        # None is after the last result of each statement.
        if (result := pgconn.get_result()) is not None:
            if result.status == _PIPELINE_SYNC:
                return results
            results.append(result)


def _checked(raw: Any, results: list[Any]) -> list[Any]:
    for result in results:
        if result.error_message:
            from psycopg import OperationalError as Lost  # noqa: PLC0415 - an extra
            from psycopg.errors import error_from_result  # noqa: PLC0415

            if raw.broken:
                raise Lost(result.get_error_message())
            raise error_from_result(result)
    return results


def is_in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Is a transaction open on the server? Call it only if `is_usable`."""
    raw: Any = connection.connection
    return bool(int(raw.pgconn.transaction_status))


def is_usable(connection: BaseDatabaseWrapper) -> bool:
    """May prepared statements be used here? Not while Django logs or wraps statements, and not behind a proxy."""
    if connection.vendor != "postgresql" or connection.queries_logged or connection.execute_wrappers:
        return False
    connection.ensure_connection()
    return _at_hand(connection).may_prepare


def numbered(statement: str) -> str:
    """A statement with Django's placeholders (`%s`) as one with PostgreSQL's (`$1`, `$2`, …)."""
    first, *others = statement.split("%s")
    return first + "".join(f"${number}{part}" for number, part in enumerate(others, 1))


def is_worthwhile(connection: BaseDatabaseWrapper) -> bool:
    """May prepared statements be used, and has this connection executed some statements that it could have prepared?

    A connection that a request opens and closes executes only a few, and preparing takes two round trips.
    """
    raw: Any = connection.connection
    if connection.vendor != "postgresql" or raw is None or connection.needs_rollback:
        return False
    asked: int = getattr(raw, _ASKED, 0)
    if asked < _SELDOM_AT_MOST:
        with suppress(AttributeError):  # psycopg 2
            setattr(raw, _ASKED, asked + 1)
        return False
    return is_usable(connection)


def _at_hand(connection: BaseDatabaseWrapper) -> _AtHand:
    raw: Any = connection.connection
    at_hand: _AtHand | None = getattr(raw, _AT_HAND, None)
    if at_hand is None:
        at_hand = _AtHand(_may_prepare(connection, raw), {})
        setattr(raw, _AT_HAND, at_hand)
    return at_hand


def _may_prepare(connection: BaseDatabaseWrapper, raw: Any) -> bool:
    # libpq would block all greenlets of a thread; psycopg 2 does not expose it, and Windows cannot wait for it with poll().
    if detect_environment() != "default" or not (hasattr(raw, "pgconn") and hasattr(select, "poll")):
        return False
    with connection.wrap_database_errors:
        (answering,) = raw.execute("SELECT pg_backend_pid()").fetchone()
    return bool(answering == raw.info.backend_pid)
