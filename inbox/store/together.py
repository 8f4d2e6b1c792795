"""Many deliveries that share one transaction, written by one statement."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import connections

from inbox.conf import inbox_options
from inbox.models import State
from inbox.store.arrivals import begin_fresh
from inbox.store.dialect import BOUND, TABLE, UNBOUND, as_bound, binary, fetch_all
from inbox.store.rows import COLUMNS, Guard, NewRow, emptied, locked_means_busy
from outbox.database.connections import is_outermost, is_postgresql
from outbox.database.now import now

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

IN_JSON = {column: "text" if kind == "jsonb" else kind for column, kind in COLUMNS.items() if column != "body"}
"""The columns of many rows that are sent as one JSON document: a parameter for each would cost more than the INSERT."""
VALUES = ", ".join("headers::jsonb" if column == "headers" else column for column in COLUMNS)


def begin_together(alias: str, rows: Sequence[NewRow], duplicate_timeout: timedelta) -> tuple[Guard, list[NewRow]] | None:
    """∅ → done for many at once, as the first statement of their transaction: the guard, and those of `rows`, in their order,
    that are not duplicates of others or of each other. None: all are duplicates.

    Where `arrivals.begin_fresh` writes `received`, so does this.

    Raises:
        ConcurrentDuplicate: another transaction is inserting one of them and did not end within `duplicate_timeout`.
    """
    connection = connections[alias]
    state = State.DONE if is_postgresql(connection) and is_outermost(connection) else State.RECEIVED
    is_emptied = state is State.DONE and not inbox_options().keeps_all_bodies
    if is_postgresql(connection):
        found = _insert(alias, [*map(emptied, rows)] if is_emptied else rows, duplicate_timeout, state)
    else:
        # A file has no round trips to save. The savepoint of the last row guards all rows.
        each = ((row, begin_fresh(alias, row, duplicate_timeout)) for row in rows)
        found = [(guard.rows[0], row.biz_id, guard.transaction) for row, guard in each if guard is not None]
    if not found:
        return None
    ids = {biz_id: pk for pk, biz_id, _ in found}
    begun: dict[str, NewRow] = {}
    for row in rows:
        if row.biz_id in ids:
            begun.setdefault(row.biz_id, row)
    ours = tuple(begun.values())
    guard = Guard(
        alias,
        tuple(ids[biz_id] for biz_id in begun),
        found[0][2],
        is_settled=state is State.DONE,
        emptied=ours if is_emptied else (),
    )
    return guard, list(ours)


def _insert(alias: str, rows: Sequence[NewRow], duplicate_timeout: timedelta, state: State) -> list[tuple[Any, ...]]:
    connection = connections[alias]
    at = now(connection)
    # One round trip. The aggregates ensure that all rows are inserted before lock_timeout is restored.
    sql = (
        f"{BOUND}, begun AS (INSERT INTO {TABLE} ({', '.join(COLUMNS)}, state, attempts, received_at, settled_at) "
        f"SELECT {VALUES}, %s, %s, {at}, {'NULL' if state is State.RECEIVED else at} "
        f"FROM bound, {rows_of(IN_JSON, connection)} AS given({', '.join(COLUMNS)}) "
        "ON CONFLICT (handler, topic, biz_id) DO NOTHING RETURNING id, biz_id) "
        f"SELECT ids, biz_ids, pg_current_xact_id()::text, {UNBOUND} "
        "FROM bound, (SELECT array_agg(id) AS ids, array_agg(biz_id) AS biz_ids FROM begun) AS all_begun"
    )
    values = [state.value, int(state is State.DONE)]
    # In one order everywhere: two transactions that insert copies of the same messages must not deadlock.
    in_one_order = sorted(rows, key=lambda row: row.biz_id)
    given = [json.dumps([as_json(row) for row in in_one_order]), [row.body for row in in_one_order]]
    with locked_means_busy():
        ((ids, biz_ids, begun, _),) = fetch_all(connection, sql, [as_bound(duplicate_timeout), *values, *given])
    return [(pk, biz_id, begun) for pk, biz_id in zip(ids or (), biz_ids or (), strict=True)]


def rows_of(columns: Mapping[str, str], connection: BaseDatabaseWrapper) -> str:
    """The rows of two parameters: a JSON document with these columns, and an array of the bodies."""
    typed = ", ".join(f"{column} {kind}" for column, kind in columns.items())
    return f"ROWS FROM (json_to_recordset(%s::json) AS ({typed}), unnest({binary(connection)}::bytea[]))"


def as_json(row: NewRow) -> dict[str, Any]:
    """`row` without its body, as `IN_JSON` has it."""
    values: dict[str, Any] = {column: getattr(row, column) for column in IN_JSON}
    values["created_at"] = row.created_at.isoformat() if row.created_at else None
    return values
