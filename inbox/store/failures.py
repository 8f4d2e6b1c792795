"""The failure of a message in its row: error, class, place, instants, and the latest failed attempts with their tracebacks.

All of it is written by the statement that changes the state.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.db.models import Case, F, Func, JSONField, Value, When

from inbox.store.rows import ABANDONED, Failure
from outbox.database.connections import is_postgresql
from outbox.database.now import DatabaseTime, now
from outbox.kernel.failures import COMMITTED_BY_ITSELF, REFUSED
from outbox.kernel.text import ERROR_LENGTH, NAME_LENGTH, TRACEBACK_LENGTH, printable

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.sql.compiler import SQLCompiler

ATTEMPTS_KEPT = 10
"""The latest failed attempts of a message are kept, each with its traceback."""
_ATTEMPT_LENGTH = 6_000
_OWN_LENGTH = 2_000

NO_FAILURE = {"last_error": "", "traceback": "", "error_class": "", "error_place": "", "failing_since": None}
"""What the row of a handled message says. Its failed attempts stay."""

ABANDONED_NOW = (
    "last_error = %s, error_class = %s, error_place = '', failing_since = {now}, failed_at = {now}, settled_at = {now}"
)
ABANDONED_AS = (ABANDONED, COMMITTED_BY_ITSELF)
"""The parameters of `ABANDONED_NOW`."""

FAILED_NOW = ("failures", "failing_since", "failed_at")
"""Columns of a new row that has failed: see `failed_now`."""

_AT = {
    "postgresql": "to_char(statement_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')",
    "sqlite": "STRFTIME('%%Y-%%m-%%dT%%H:%%M:%%fZ', 'now')",
}
_ATTEMPT = {
    "postgresql": f"jsonb_build_array(%s::jsonb || jsonb_build_object('at', {_AT['postgresql']}))",
    "sqlite": f"json_set(%s, '$.at', {_AT['sqlite']})",
}


def as_written(failure: Failure) -> dict[str, Any]:
    """The columns of a failure, for the UPDATE that changes the state."""
    written: dict[str, Any] = as_inserted(failure)
    if failure.put_off:
        return {**written, "failing_since": None}
    same = When(
        error_class=written["error_class"],
        error_place=written["error_place"],
        failing_since__isnull=False,
        then=F("failing_since"),
    )
    return {
        **written,
        "failing_since": Case(same, default=DatabaseTime()),
        "failed_at": DatabaseTime(),
        "failures": _OneMore(_attempt(failure)),
    }


def as_inserted(failure: Failure) -> dict[str, str]:
    """The columns of a failure that are plain text."""
    return {
        "last_error": printable(failure.error, ERROR_LENGTH),
        "error_class": printable(failure.error_class, NAME_LENGTH)[:NAME_LENGTH],
        "error_place": printable(failure.error_place, NAME_LENGTH)[:NAME_LENGTH],
        "traceback": printable(failure.traceback, TRACEBACK_LENGTH),
    }


def failed_now(connection: BaseDatabaseWrapper, failure: Failure | None) -> tuple[Sequence[str], list[Any]]:
    """The values of `FAILED_NOW` for a new row, and their parameters."""
    if failure is None or failure.put_off:
        return ["NULL"] * len(FAILED_NOW), []
    first = _ATTEMPT[connection.vendor]
    if not is_postgresql(connection):
        first = f"json_array({first})"
    return [first, now(connection), now(connection)], [_attempt(failure)]


def refused_now(state: str, at: str) -> str:
    """Class and instants of a new row that is a dead letter without having been run; `state` is SQL."""
    is_dead = f"CASE WHEN {state} = 'dead' THEN"
    return f"{is_dead} '{REFUSED}' ELSE '' END, {is_dead} {at} END, {is_dead} {at} END"


def _attempt(failure: Failure) -> str:
    return json.dumps(
        {
            "attempt": failure.attempts,
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
        return f"COALESCE({bounded}, '[]'::jsonb) || {_ATTEMPT['postgresql']}", attempt

    def as_sqlite(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        (kept, _), (_, attempt) = map(compiler.compile, self.get_source_expressions())
        bounded = f"CASE WHEN json_array_length({kept}) >= {ATTEMPTS_KEPT} THEN json_remove({kept}, '$[0]') ELSE {kept} END"
        return f"json_insert(COALESCE({bounded}, '[]'), '$[#]', {_ATTEMPT['sqlite']})", attempt
