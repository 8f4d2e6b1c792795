"""Prepared statements: PostgreSQL parses, and possibly plans, a statement once for many messages.

Django disables psycopg's own prepared statements, for a good reason: behind a proxy that pools transactions the next
transaction may run in another server process, which has not prepared the statement. This module detects such a proxy: the
answering process is not the one that opened the session. Then it prepares nothing, and statements are sent as text.

Which statements are prepared belongs to the server session, and a pool may hand that over to another connection object, or
discard its statements. So the server is asked after each `connect()` of Django's, and again after a statement was missing.

Statements go directly to libpq through the connection that psycopg documents for that purpose (`Connection.pgconn`). A cursor
and the adaptation of parameters with known types take longer than PostgreSQL takes to run the statement. A project that puts
code of its own in between gets all statements as text through its own cursors; see `exactly_once.sql.connections`.
"""

from __future__ import annotations

import re
import select
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import DataError, OperationalError

from exactly_once.sql.connections import is_direct
from exactly_once.sql.faults import SERIALIZATION_FAILURE, sqlstate_of

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_MISSING, _EXISTS = "26000", "42P05"
_SESSION = "_exactly_once_session"
_TEXT, _BINARY = 0, 1
_BEGIN, _COMMIT = b"BEGIN", b"COMMIT"
_BINARY_TYPES = {"bytea", "bytea[]"}
_OID_OF_BYTEA = 17
_IN_ERROR = 3
"""libpq's PQTRANS_INERROR: the open transaction has failed."""
_PIPELINE_SYNC = 10
"""libpq's PGRES_PIPELINE_SYNC, the answer to a pipeline's end."""
_MOST_RUNS = 1000
_SELDOM_AT_MOST = 5
"""As psycopg's `prepare_threshold`."""
_MOST_LOSSES = 2
"""Then a proxy, or a pool that Django does not know of, discards statements again and again: nothing more is prepared."""
_PRESENT = b"SELECT concat_ws(' ', pg_backend_pid(), string_agg(name, ' ')) FROM pg_prepared_statements"
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
class _Session:
    """What is known of the server session of a driver connection, since it was last connected to or taken from a pool.

    Attributes:
        since: identifies the `connect()`. A pool gives the same driver connection to many.
        runs: by the name of a prepared statement, how often it was run.
        losses: how often a statement was missing.
        asked: how often a statement that is run seldom could have been prepared.
        may_prepare: None until the server was asked.
    """

    since: float | None
    runs: dict[bytes, int]
    losses: int = 0
    asked: int = 0
    may_prepare: bool | None = None


class PreparedStatement:
    """A statement with PostgreSQL's types of its parameters. In `text` the parameters are `$1`, `$2`, ….

    A value is text in PostgreSQL's format, bytes, a list of bytes, an instant, or an object whose `str` is such text.

    Args:
        most_runs: the statement is prepared again after this many runs. From the sixth run on PostgreSQL may keep a plan until
            the next ANALYZE. A plan from a nearly empty table scans the whole table, even after it has grown.
        returns_binary: `fetch` receives the values in PostgreSQL's binary format, which is faster for large ones. Not for
            columns of JSON and instants, which Django reads as text.
        replaces: the name of a statement that is not run any more once this one is.
    """

    def __init__(
        self,
        name: str,
        types: Sequence[str],
        text: str,
        *,
        most_runs: int = _MOST_RUNS,
        returns_binary: bool = False,
        replaces: str = "",
    ) -> None:
        self._most_runs = most_runs
        self._replaces = replaces.encode()
        self._result_format = _BINARY if returns_binary else _TEXT
        self._name = name.encode()
        _names.add(self._name)
        # One line, as it is shown in logs and in `pg_stat_activity`.
        text = re.sub(r"\s*\n\s*", " ", text).strip()
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

    def execute(
        self, connection: BaseDatabaseWrapper, parameters: Sequence[Any], *, then: Sequence[bytes] = ()
    ) -> StatementResult:
        """Run it, in the open transaction if there is one. Call it only if `is_usable`.

        Args:
            then: statements to run after it, in the same round trip.

        Raises:
            StatementLost: see there.
            django.db.Error: PostgreSQL refused the statement, or the connection was lost.
        """
        (result,) = _run(connection, [(self, parameters)], after=then)
        return _read(result)

    def fetch(
        self, connection: BaseDatabaseWrapper, parameters: Sequence[Any], *, then: Sequence[bytes] = ()
    ) -> list[tuple[Any, ...]]:
        """As `execute`, but return rows as a psycopg cursor does; this is faster for many rows."""
        (result,) = _run(connection, [(self, parameters)], after=then)
        return rows_of(connection, result)

    def fetch_after(self, connection: BaseDatabaseWrapper, script: str, parameters: Sequence[str]) -> list[tuple[Any, ...]]:
        """As `fetch`, after the statements of `script`, in the same round trip and transaction; see `execute_script`."""
        session = _session(connection)
        with connection.wrap_database_errors:
            try:
                self._prepared(connection.connection, session, ())
                placeholders = ", ".join(["%s"] * len(parameters))
                return execute_script(connection, f"{script}; ", f"EXECUTE {self._name.decode()} ({placeholders})", parameters)
            except Exception as error:
                _raise_if_lost(error, session)
                raise

    def _prepared(self, raw: Any, session: _Session, parameters: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of libpq for one more run; prepare it if necessary."""
        runs = session.runs
        if runs.get(self._name, 0) >= self._most_runs:
            _checked(raw, [raw.pgconn.exec_(b"DEALLOCATE " + self._name)])
            del runs[self._name]
        if self._name not in runs:
            if runs.pop(self._replaces, None) is not None:
                _checked(raw, [raw.pgconn.exec_(b"DEALLOCATE " + self._replaces)])
            _checked(raw, [raw.pgconn.exec_(self._prepare)])
            runs[self._name] = 0
        runs[self._name] += 1
        return self._name, _adapted(parameters), self._formats, self._result_format


Prepared = tuple[PreparedStatement, Sequence[Any], Sequence[bytes]]
"""A statement with its parameters, and statements without parameters that follow it."""
Rows = Sequence[Sequence[Any]]
_names: set[bytes] = set()
"""Of all statements of this process."""


def execute_script(
    connection: BaseDatabaseWrapper, script: str, last: str = "", parameters: Sequence[Any] = (), *, commit: bool = False
) -> list[tuple[Any, ...]]:
    """Run statements without parameters in one round trip, in the open transaction; the rows of the last one.

    If the transaction has not begun on the server, it begins in the same round trip. Outside of `atomic()` the statements are
    a transaction of their own. Call it only if `is_usable`.

    Args:
        last: a statement with parameters, in Django's form, that follows.
        commit: also commit. Django's own commit, or rollback, finds no open transaction then, and sends nothing.

    Raises:
        django.db.Error: one of them failed; those after it have not run.
    """
    raw: Any = connection.connection
    with connection.wrap_database_errors:
        if last:
            from psycopg import ClientCursor  # noqa: PLC0415 - an extra

            script += ClientCursor(raw).mogrify(last, parameters)
        begin = f"{_BEGIN.decode()}; " if _is_to_begin(raw) else ""
        if commit:
            script += f"; {_COMMIT.decode()}"
        (result,) = _checked(raw, [raw.pgconn.exec_(f"{begin}{script}".encode())])
        return rows_of(connection, result)


def run_together(
    connection: BaseDatabaseWrapper, runs: Sequence[tuple[PreparedStatement, Sequence[Any]]]
) -> list[StatementResult]:
    """Run statements in one round trip; outside of `atomic()` as a transaction of their own. Call it only if `is_usable`.

    Raises:
        StatementLost: see there.
        django.db.Error: one failed, and none has an effect.
    """
    return [_read(result) for result in _run(connection, runs)]


def run_and_commit(
    connection: BaseDatabaseWrapper,
    runs: Sequence[tuple[PreparedStatement, Sequence[Any]]],
    *,
    before: Sequence[bytes] = (),
    following: Prepared | None = None,
) -> tuple[list[Any], Callable[[], Rows] | None]:
    """Run the last statements of the open transaction, and commit, in one round trip. If one of them fails, nothing commits.

    Django's own commit finds no open transaction then, and sends nothing. Call it only if `is_usable`.

    Args:
        before: statements without parameters to run before them.
        following: the first statement of the next transaction, which begins in the same round trip, and only if this one has
            committed. Only if `may_begin`.

    Returns:
        PostgreSQL's result of each, and what waits for the rows of `following`, in PostgreSQL's text format: call it before
        anything else uses the connection.

    Raises:
        StatementLost: see there.
        django.db.Error: one failed, and the transaction is still open; or the commit failed, and it is not.
    """
    raw: Any = connection.connection
    results = _run(connection, runs, before=before, after=[_COMMIT], following=following)
    if following is None:
        return results, None

    def answer() -> Rows:
        with connection.wrap_database_errors:
            try:
                return _read(_checked(raw, _end_of_pipeline(raw))[1]).rows
            except Exception as error:
                _raise_if_lost(error, getattr(raw, _SESSION))
                raise

    return results, answer


def _run(
    connection: BaseDatabaseWrapper,
    runs: Sequence[tuple[PreparedStatement, Sequence[Any]]],
    *,
    before: Sequence[bytes] = (),
    after: Sequence[bytes] = (),
    following: Prepared | None = None,
) -> list[Any]:
    """PostgreSQL's result of each statement."""
    raw: Any = connection.connection
    session: _Session = getattr(raw, _SESSION)  # since `is_usable`
    statements = runs if following is None else [*runs, following[:2]]
    with connection.wrap_database_errors:
        try:
            given = []
            for statement, parameters in statements:
                given.append(statement._prepared(raw, session, parameters))  # noqa: SLF001 - of this module
            begin = _is_to_begin(raw)
            if begin or after or len(given) > 1:
                before = [_BEGIN, *before] if begin else before
                return _pipelined(raw, before, given, after, None if following is None else following[2])
            return _checked(raw, [raw.pgconn.exec_prepared(*given[0])])
        except Exception as error:
            _raise_if_lost(error, session)
            raise


def _raise_if_lost(error: Exception, session: _Session) -> None:
    sqlstate = sqlstate_of(error)
    if sqlstate in {_MISSING, _EXISTS}:
        # If it exists, another client has prepared it: there is a proxy, and it shares its server processes.
        session.losses += 1 if sqlstate == _MISSING else _MOST_LOSSES
        session.may_prepare = None
        raise StatementLost(str(error)) from None


def _read(result: Any) -> StatementResult:
    rows: list[list[Any]] = []
    for row in range(result.ntuples):
        rows.append([])
        for column in range(result.nfields):
            value = result.get_value(row, column)
            rows[row].append(None if value is None else value.decode())
    return StatementResult(rows, result.command_tuples or 0)


def rows_of(connection: BaseDatabaseWrapper, result: Any) -> list[tuple[Any, ...]]:
    """The rows of PostgreSQL's result, as a psycopg cursor returns them."""
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
            if isinstance(value, str):
                text = str.__str__(value)  # of an enumeration's member, which str() names
            else:
                text = value.isoformat() if isinstance(value, datetime) else str(value)
            if "\0" in text:
                # libpq would end the text there.
                raise DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
            adapted.append(text.encode())
    return adapted


def _array(values: Sequence[bytes]) -> bytes:
    """A `bytea[]` in PostgreSQL's binary format: dimensions, is any NULL, type, length, first index; then each element."""
    elements = (struct.pack("!i", len(value)) + value for value in values)
    return struct.pack("!5i", 1, 0, _OID_OF_BYTEA, len(values), 1) + b"".join(elements)


def may_begin(connection: BaseDatabaseWrapper) -> bool:
    """May the next transaction begin without settings of its own? Call it only if `is_usable`."""
    raw: Any = connection.connection
    return raw.isolation_level is raw.read_only is raw.deferrable is None


def _is_to_begin(raw: Any) -> bool:
    """Would psycopg begin a plain transaction with its next statement? One with settings of its own is begun here."""
    if raw.autocommit or int(raw.pgconn.transaction_status):
        return False
    if raw.isolation_level is raw.read_only is raw.deferrable is None:
        return True
    raw.execute("")  # takes no snapshot, so that the isolation level may still be set
    return False


def _pipelined(
    raw: Any,
    before: Sequence[bytes],
    prepared: Sequence[tuple[Any, ...]],
    after: Sequence[bytes],
    then: Sequence[bytes] | None = None,
) -> list[Any]:
    """The results of prepared statements that are sent together with others; none runs after one that fails.

    Args:
        then: the last prepared statement begins the next transaction, in which these follow it. Its results are left: the
            server sends the others when it is asked to, before it runs that one.
    """
    pgconn = raw.pgconn
    here = len(prepared) - (then is not None)
    try:
        pgconn.enter_pipeline_mode()
        for statement in before:
            pgconn.send_query_params(statement, None)
        for one in prepared[:here]:
            pgconn.send_query_prepared(*one)
        for statement in after:
            pgconn.send_query_params(statement, None)
        if then is not None:
            pgconn.send_flush_request()
            pgconn.send_query_params(_BEGIN, None)
            pgconn.send_query_prepared(*prepared[-1])
            for statement in then:
                pgconn.send_query_params(statement, None)
        pgconn.pipeline_sync()
        results = _results(pgconn, inf if then is None else len(before) + here + len(after))
        if then is None:
            pgconn.exit_pipeline_mode()
    except BaseException:
        # What is still in flight would be taken for the answers of the next statement.
        raw.close()
        raise
    if then is not None and any(result.error_message for result in results):
        _end_of_pipeline(raw)
    return _checked(raw, results)[len(before) : len(before) + here]


def _end_of_pipeline(raw: Any) -> list[Any]:
    try:
        results = _results(raw.pgconn)
        raw.pgconn.exit_pipeline_mode()
    except BaseException:
        raw.close()
        raise
    return results


def _results(pgconn: Any, number: float = inf) -> list[Any]:
    """The results of a pipeline, so many or up to its end. PQgetResult itself would wait with Python's global lock held."""
    results: list[Any] = []
    while len(results) < number:
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
    return results


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
    """May prepared statements be used here? Not where statements must go through Django's cursor, and not behind a proxy."""
    if connection.vendor != "postgresql" or not is_direct(connection):
        return False
    session = _session(connection)
    return session.may_prepare if session.may_prepare is not None else _asked(connection, session)


def numbered(statement: str) -> str:
    """A statement with Django's placeholders (`%s`) as one with PostgreSQL's (`$1`, `$2`, …)."""
    first, *others = statement.split("%s")
    return first + "".join(f"${number}{part}" for number, part in enumerate(others, 1))


def is_worthwhile(connection: BaseDatabaseWrapper) -> bool:
    """May prepared statements be used, and has this connection executed some statements that it could have prepared?

    A connection that a request opens and closes executes only a few, and preparing takes two round trips.
    """
    is_open = connection.connection is not None and not connection.needs_rollback
    if connection.vendor != "postgresql" or not is_open or not is_direct(connection):
        return False
    session = _session(connection)
    if session.asked < _SELDOM_AT_MOST:
        session.asked += 1
        return False
    return session.may_prepare if session.may_prepare is not None else _asked(connection, session)


def _session(connection: BaseDatabaseWrapper) -> _Session:
    raw: Any = connection.connection
    session: _Session | None = getattr(raw, _SESSION, None)
    if session is None:
        session = _Session(since=connection.close_at, runs={})
        setattr(raw, _SESSION, session)
    # Django's connect() sets close_at: to an instant if the connection may be from a pool, where CONN_MAX_AGE must be 0.
    elif session.since != connection.close_at:
        session.since, session.asked, session.may_prepare = connection.close_at, 0, None
    return session


def _asked(connection: BaseDatabaseWrapper, session: _Session) -> bool:
    """May statements be prepared in this session? The server answers nothing in a transaction that has failed."""
    raw: Any = connection.connection
    if int(raw.pgconn.transaction_status) == _IN_ERROR:
        return False
    # libpq would block all greenlets of a thread, and Windows cannot wait for it with poll().
    is_possible = not _is_green() and hasattr(select, "poll") and session.losses < _MOST_LOSSES
    session.may_prepare = is_possible and _is_ours(connection, raw, session)
    return session.may_prepare


def _is_green() -> bool:
    """Has gevent or eventlet replaced the sockets of the standard library?"""
    return socket.socket.__module__ != "socket"


def _is_ours(connection: BaseDatabaseWrapper, raw: Any, session: _Session) -> bool:
    """Does the process that opened the session answer, and are all statements with our names in it ours?"""
    with connection.wrap_database_errors:
        # Not by a cursor, which would begin the transaction.
        (result,) = _checked(raw, [raw.pgconn.exec_(_PRESENT)])
    answering, *present = result.get_value(0, 0).split(b" ")
    session.runs = {name: runs for name, runs in session.runs.items() if name in present}
    return int(answering) == raw.info.backend_pid and _names.intersection(present) <= session.runs.keys()
