"""The failure of a message in its row: error, class, place, instants, and the latest failed attempts with their tracebacks.

All of it is written by the statement that changes the state.
"""

import json
from datetime import timedelta
from functools import partial
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Case, F, Func, JSONField, Value, When
from django.db.models.sql.compiler import SQLCompiler

from exactly_once.failures import COMMITTED_BY_ITSELF
from exactly_once.sql.now import DatabaseTime
from exactly_once.sql.prepared_statements import is_usable
from exactly_once.wire.text import ERROR_LENGTH, NAME_LENGTH, TRACEBACK_LENGTH, printable
from inbox import deaths
from inbox.states import ABANDON, DIE, RETRY_LATER
from inbox.store.message_rows import ABANDONED, Failure, OrderedKey
from inbox.store.ordering import LOCK_TIMEOUT, deciding, limits, promote_behind
from inbox.store.trail_entries import update

ATTEMPTS_KEPT = 10
"""The latest failed attempts of a message are kept, each with its traceback."""
_ATTEMPT_LENGTH = 6_000
_OWN_LENGTH = 2_000

ABANDON_AS = {"last_error": ABANDONED, "error_class": COMMITTED_BY_ITSELF, **ABANDON.columns}
"""What is written of a message whose handler committed by itself."""

_AT = {
    "postgresql": "to_char(statement_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')",
    "sqlite": "STRFTIME('%%Y-%%m-%%dT%%H:%%M:%%fZ', 'now')",
}
FIRST_ATTEMPT = {
    "postgresql": f"jsonb_build_array({{}}::jsonb || jsonb_build_object('at', {_AT['postgresql']}))",
    "sqlite": f"json_array(json_set({{}}, '$.at', {_AT['sqlite']}))",
}
"""The failed attempts of a row that has failed once, by `connection.vendor`; the attempt is JSON."""


def as_failed(failure: Failure, *, leaves_order: bool = False) -> dict[str, Any]:
    """The columns of a message that has failed: retrying, or dead without a backoff."""
    texts = _texts(failure)
    columns = {
        **(DIE if failure.retry_after is None else RETRY_LATER).columns,
        "attempts": failure.attempts,
        **texts,
        **({} if failure.retry_after is None else {"next_attempt_at": DatabaseTime(failure.retry_after)}),
        "quarantined": failure.quarantined,
        **({"ordered": False} if leaves_order else {}),
    }
    if failure.deferred:
        return {**columns, "failing_since": None}
    is_same = {name: texts[name] for name in ("error_class", "error_place")}
    same = When(**is_same, failing_since__isnull=False, then=F("failing_since"))
    return {
        **columns,
        "failing_since": Case(same, default=DatabaseTime()),
        "failed_at": DatabaseTime(),
        "failures": _OneMore(_attempt(failure)),
    }


def fail(
    alias: str,
    rows: Any,
    failure: Failure,
    *,
    was: str,
    leaves: OrderedKey | None = None,
    longest_wait: timedelta = LOCK_TIMEOUT,
    **further: Any,
) -> bool:
    """→ retrying | dead, for one row, a query; one round trip where statements are prepared. False: there is no such row.

    A dead letter keeps its place in the order of its key, unless it `leaves` that order, which promotes the next one.

    Args:
        further: columns that are written, too.

    Raises:
        django.db.OperationalError: another session has locked the row and does not release it.
    """
    connection = connections[alias]
    columns = {**as_failed(failure, leaves_order=leaves is not None), **further}
    write = partial(update, alias, rows, columns, was=was, reason=failure.error, matters=not failure.deferred)
    is_reported = deaths.reported and failure.retry_after is None
    if leaves is None and not (connection.in_atomic_block or is_reported) and is_usable(connection):
        return bool(write(script=limits(longest_wait)))
    with deciding(alias, longest_wait):
        failed = bool(write())
        promote_behind(alias, leaves if failed else None)
        return failed


def as_inserted(failure: Failure) -> dict[str, Any]:
    """The `arrivals.Values` of a failure."""
    return {
        **_texts(failure),
        "attempt": None if failure.deferred else _attempt(failure),
        "due_after": None if failure.retry_after is None else failure.retry_after.total_seconds(),
        "attempts": failure.attempts,
        "quarantined": failure.quarantined,
    }


def _texts(failure: Failure) -> dict[str, Any]:
    return {
        "last_error": printable(failure.error, ERROR_LENGTH),
        "error_class": printable(failure.error_class, NAME_LENGTH)[:NAME_LENGTH],
        "error_place": printable(failure.error_place, NAME_LENGTH)[:NAME_LENGTH],
        "traceback": printable(failure.traceback, TRACEBACK_LENGTH),
    }


def _attempt(failure: Failure) -> str:
    return json.dumps(
        {
            "attempt": failure.attempts,
            "seconds": failure.seconds,
            "error": printable(failure.error, ERROR_LENGTH),
            "class": printable(failure.error_class, NAME_LENGTH),
            "place": printable(failure.error_place, NAME_LENGTH),
            "own": printable(failure.own_frames, _OWN_LENGTH),
            "traceback": printable(failure.traceback, _ATTEMPT_LENGTH),
        }
    )


class _OneMore(Func):
    """The failed attempts with one more at the end; the oldest ones are dropped."""

    output_field = JSONField()

    def __init__(self, attempt: str) -> None:
        super().__init__(F("failures"), Value(attempt))

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        (kept, _), (_, attempt) = map(compiler.compile, self.get_source_expressions())
        bounded = f"CASE WHEN jsonb_array_length({kept}) >= {ATTEMPTS_KEPT} THEN {kept} - 0 ELSE {kept} END"
        return f"COALESCE({bounded}, '[]'::jsonb) || {FIRST_ATTEMPT['postgresql'].format('%s')}", attempt

    def as_sqlite(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        (kept, _), (_, attempt) = map(compiler.compile, self.get_source_expressions())
        bounded = f"CASE WHEN json_array_length({kept}) >= {ATTEMPTS_KEPT} THEN json_remove({kept}, '$[0]') ELSE {kept} END"
        return (
            f"json_insert(COALESCE({bounded}, '[]'), '$[#]', json_extract({FIRST_ATTEMPT['sqlite'].format('%s')}, '$[0]'))",
            attempt,
        )
