"""Inserting messages: the columns of a row, and the one statement that inserts receipts and the messages of new ones.

On PostgreSQL a load of any size is one statement with the same text, so it is prepared: the rows are one JSON document, because
a parameter for each value would cost more than the INSERT, and their bodies one array. The fast path has a single row and gives
its values as parameters. SQLite saves no round trips and gets one statement for each row.

The rows are numbered in the order in which they are given. Rows that exist already are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction

from exactly_once.failures import DEFERRED
from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.days import DAY_OF_NOW, LIVE
from exactly_once.sql.now import NOW, NOW_AFTER
from exactly_once.sql.prepared_statements import PLANNED_SINGLY, PreparedStatement, is_usable
from inbox.states import State
from inbox.store.dialect import BOUND, RECEIPTS, TABLE, UNBOUND, adapted, as_bound, binary, fetch_all
from inbox.store.failures import FIRST_ATTEMPT
from inbox.store.ordering import OPEN
from inbox.store.rows import COLUMNS, NewRow, locked_means_busy
from inbox.store.trail import ENTRY, is_recorded, record, this_process

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


@dataclass(frozen=True, kw_only=True, slots=True)
class Insertion:
    """A row to insert.

    Attributes:
        state: with `waiting` and `leads`, it is `received` if no open row of its key precedes it.
        leads: it is the first of its ordering key in its load.
        due_after: seconds until it is due; a row that waits behind another is not due. None: it is not due at all.
        replaces_id: the dead row whose payload an operator has corrected.
        attempt: its first failed attempt, as JSON, see `failures`.
        duplicates: deliveries that are already counted on the row, and by their cause in the following counts.
        conflicts: 1 if such a duplicate has other content, which is that of this row.
        conflicting_attributes: then those of the row, see `attributes_of`.
        result: what its handler returned, as JSON.
    """

    row: NewRow
    state: State
    leads: bool = False
    due_after: float | None = None
    attempts: int = 0
    fence: int = 0
    ordered: bool = False
    place: int | None = None
    replaces_id: int | None = None
    quarantined: bool = False
    last_error: str = ""
    error_class: str = ""
    error_place: str = ""
    attempt: str | None = None
    traceback: str = ""
    duplicates: int = 0
    redeliveries: int = 0
    resends: int = 0
    replays: int = 0
    conflicts: int = 0
    conflicting_attributes: str | None = None
    result: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Inserted:
    """The rows of a load that did not exist.

    Attributes:
        rows: by biz-id, the id and the state of each; of those of one biz-id, the last.
        ids: of all.
        transaction: the id of the inserting transaction; "" on SQLite.
    """

    rows: Mapping[str, tuple[int, str]]
    ids: Sequence[int]
    transaction: str


_OPTIONAL = {
    "leads": ("boolean", "false"),
    "due_after": ("float8", "NULL"),
    "attempts": ("int", "0"),
    "fence": ("bigint", "0"),
    "ordered": ("boolean", "false"),
    "place": ("bigint", "NULL"),
    "replaces_id": ("bigint", "NULL"),
    "quarantined": ("boolean", "false"),
    "last_error": ("text", "''"),
    "error_class": ("text", "''"),
    "error_place": ("text", "''"),
    "attempt": ("text", "NULL"),
    "traceback": ("text", "''"),
    "duplicates": ("int", "0"),
    "redeliveries": ("int", "0"),
    "resends": ("int", "0"),
    "replays": ("int", "0"),
    "conflicts": ("int", "0"),
    "conflicting_attributes": ("text", "NULL"),
    "result": ("text", "NULL"),
}
"""The values of an `Insertion` that most rows have the default of: type and default. A source gives NULL for the default."""
_TEXTS = [column for column in COLUMNS if column != "body"]
_columns_of, _texts_of, _optional_of = attrgetter(*COLUMNS), attrgetter(*_TEXTS), attrgetter(*_OPTIONAL)
_DEFAULTS = {field.name: field.default for field in fields(Insertion)}
_NOT_STORED = {"leads", "due_after", "attempt"}
_GIVEN = [*COLUMNS, "state", *_OPTIONAL]
_DOCUMENT = {
    **{column: "text" if COLUMNS[column] == "jsonb" else COLUMNS[column] for column in _TEXTS},
    "state": "varchar",
    **{column: kind for column, (kind, _) in _OPTIONAL.items()},
    "entry": "text",
}
"""The values of a row in a JSON document: all but the body, with PostgreSQL's types; and the reason in its trail entry."""


def _insert(vendor: str, source: str) -> str:
    """Insert messages from a relation with the columns `_GIVEN`, `id` and `became`, the state that they get."""
    at = NOW[vendor]
    values = {
        "id": "given.id",
        **{column: f"given.{column}" for column in COLUMNS},
        **{column: f"COALESCE(given.{column}, {default})" for column, (_, default) in _OPTIONAL.items()},
        "conflicting_id": "CASE WHEN given.conflicts > 0 THEN given.message_id ELSE '' END",
        "conflicting_body": "CASE WHEN given.conflicts > 0 THEN given.body END",
        "conflicting_at": f"CASE WHEN given.conflicts > 0 THEN {at} END",
        "state": "given.became",
        "received_at": at,
        "settled_at": f"CASE WHEN given.became IN ('done', 'dead', 'shed') THEN {at} END",
        "day": f"CASE WHEN given.became IN ('done', 'shed') THEN {DAY_OF_NOW[vendor]} ELSE {LIVE} END",
        "next_attempt_at": "CASE WHEN given.due_after IS NOT NULL AND given.became <> 'waiting' "
        f"THEN {NOW_AFTER[vendor].replace('%s', 'given.due_after')} END",
    }
    fails = f"given.became IN ('retrying', 'dead') AND COALESCE(given.error_class, '') NOT IN ('', '{DEFERRED}')"
    values["failing_since"] = values["failed_at"] = f"CASE WHEN {fails} THEN {at} END"
    values["failures"] = f"CASE WHEN given.attempt IS NOT NULL THEN {FIRST_ATTEMPT[vendor].format('given.attempt')} END"
    if vendor == "postgresql":
        values["headers"] += "::jsonb"
        values["result"] += "::jsonb"
        values["conflicting_attributes"] += "::jsonb"
    stored = [column for column in values if column not in _NOT_STORED]
    return f"INSERT INTO {TABLE} ({', '.join(stored)}) SELECT {', '.join(values[column] for column in stored)} FROM {source}"


_COPIED = "handler, topic, biz_id, message_id, digest"
_ONCE = "ON CONFLICT (handler, topic, biz_id) DO NOTHING RETURNING id"
_PRECEDES = f"SELECT 1 FROM {TABLE} m WHERE m.handler = source.handler AND m.key = source.key AND {OPEN}"
_BECAME = (
    f"CASE WHEN COALESCE(source.leads, false) AND source.state = 'waiting' AND NOT EXISTS ({_PRECEDES}) THEN 'received' "
    "ELSE source.state END AS became"
)


def _values_of_one(given: Mapping[str, str]) -> str:
    """One row as a source: the expressions that are given, and the defaults of the other values."""
    absent = {column: f"{default}::{kind}" for column, (kind, default) in _OPTIONAL.items() if column not in given}
    return f"(SELECT {', '.join(f'{value} AS {column}' for column, value in {**given, **absent}.items())}) AS source"


def _insert_many(document: str, bodies: str, longest_wait: str, process: str = "") -> str:
    """For PostgreSQL: one round trip that limits the wait for a lock, inserts, and restores the transaction's lock_timeout.

    The aggregates ensure that all receipts are inserted before that. A row is returned also if none is inserted.
    """
    typed = ", ".join(f"{column} {kind}" for column, kind in _DOCUMENT.items())
    entries = (
        f", entry AS ({ENTRY} SELECT message_id, handler, '', became, statement_timestamp(), {process}, entry FROM new "
        "WHERE entry IS NOT NULL)"
        if process
        else ""
    )
    bound = f"coalesce({longest_wait}, current_setting('lock_timeout'))"
    return (
        f"{BOUND.replace('%s', bound)}, source AS (SELECT * FROM ROWS FROM (json_to_recordset({document}::json) AS ({typed}), "
        f"unnest({bodies}::bytea[])) WITH ORDINALITY AS source({', '.join(_DOCUMENT)}, body, number)), "
        # Numbered before they are inserted, so that of two copies only the first has the id of a receipt.
        f"given AS MATERIALIZED (SELECT nextval('{RECEIPTS}_id_seq') AS id, source.*, {_BECAME} "
        "FROM (SELECT * FROM source ORDER BY number) AS source), "
        f"receipt AS (INSERT INTO {RECEIPTS} (id, {_COPIED}, received_at) "
        f"SELECT id, {_COPIED}, statement_timestamp() FROM bound, given ORDER BY number {_ONCE}), "
        "new AS MATERIALIZED (SELECT given.* FROM given JOIN receipt USING (id)), "
        f"message AS ({_insert('postgresql', 'new AS given')}){entries} "
        f"SELECT ids, biz_ids, states, pg_current_xact_id()::text, {UNBOUND} FROM bound, "
        "(SELECT array_agg(id ORDER BY id) AS ids, array_agg(biz_id ORDER BY id) AS biz_ids, "
        "array_agg(became ORDER BY id) AS states FROM new) AS inserted"
    )


_RECEIPT_ON_SQLITE = f"INSERT INTO {RECEIPTS} ({_COPIED}, received_at) VALUES (%s, %s, %s, %s, %s, {NOW['sqlite']}) {_ONCE}"
_MESSAGE_ON_SQLITE = (
    _insert("sqlite", f"(SELECT source.*, {_BECAME} FROM {_values_of_one(dict.fromkeys(['id', *_GIVEN], '%s'))}) AS given")
    + " RETURNING state"
)
_copied_of = attrgetter(*_COPIED.split(", "))
# They read the table, which a load may fill: see PreparedStatement.
_MANY = PreparedStatement("inbox_insert", ["text", "json", "bytea[]"], _insert_many("$2", "$3", "$1"), most_runs=PLANNED_SINGLY)
_MANY_RECORDED = PreparedStatement(
    "inbox_insert_recorded",
    ["text", "json", "bytea[]", "text"],
    _insert_many("$2", "$3", "$1", "$4"),
    most_runs=PLANNED_SINGLY,
)
_PLACES = {column: f"${number}" for number, column in enumerate(COLUMNS, 1)}
_ONE_ROW = ("state", "attempts", "fence", "due_after", "result")
"""The values of an `Insertion` that the statement for a single row takes besides the columns of its row."""
_single_of = attrgetter(*_ONE_ROW)
_others_of = attrgetter(*(name for name in _OPTIONAL if name not in _ONE_ROW))
_OTHER_DEFAULTS = tuple(_DEFAULTS[name] for name in _OPTIONAL if name not in _ONE_ROW)
_TYPES_OF_ONE = {"state": "varchar", **{name: kind for name, (kind, _) in _OPTIONAL.items() if name in _ONE_ROW}}
_OTHERS = {name: f"${len(_PLACES) + number}::{_TYPES_OF_ONE[name]}" for number, name in enumerate(_ONE_ROW, 1)}
_BOUND_OF_ONE = f"${len(_PLACES) + len(_ONE_ROW) + 1}"
# One round trip: bound the wait for a concurrent duplicate, insert, restore the transaction's own lock_timeout.
_NEW_ONE = f"(SELECT receipt.id, source.*, state AS became FROM receipt, {_values_of_one({**_PLACES, **_OTHERS})}) AS given"
_ONE = PreparedStatement(
    "inbox_begin",
    [*COLUMNS.values(), *(_TYPES_OF_ONE[name] for name in _ONE_ROW), "text"],
    f"{BOUND.replace('%s', _BOUND_OF_ONE)}, receipt AS (INSERT INTO {RECEIPTS} ({_COPIED}, received_at) "
    f"SELECT {', '.join(_PLACES[column] for column in _COPIED.split(', '))}, statement_timestamp() FROM bound {_ONCE}), "
    f"message AS ({_insert('postgresql', _NEW_ONE)}) "
    f"SELECT receipt.id, pg_current_xact_id()::text, {UNBOUND} FROM bound LEFT JOIN receipt ON true",
)


def _insert_single(connection: BaseDatabaseWrapper, insertion: Insertion, longest_wait: timedelta) -> Inserted:
    connection.validate_no_broken_transaction()
    with locked_means_busy:
        given = [*_columns_of(insertion.row), *_single_of(insertion), as_bound(longest_wait)]
        ((pk, transaction, _),) = _ONE.execute(connection, given).rows
    if pk is None:
        return Inserted(rows={}, ids=(), transaction="")
    return Inserted(rows={insertion.row.biz_id: (int(pk), insertion.state)}, ids=[int(pk)], transaction=transaction)


def insert_one(alias: str, insertion: Insertion, longest_wait: timedelta, *, recorded: bool = True) -> int | None:
    """Insert one row; its id. None: it exists.

    Raises:
        ConcurrentDuplicate: another transaction is inserting the same row and did not end within `longest_wait`.
    """
    return next(iter(insert_many(alias, [insertion], longest_wait, recorded=recorded).ids), None)


def insert_many(
    alias: str, insertions: Sequence[Insertion], longest_wait: timedelta | None = None, *, recorded: bool = True
) -> Inserted:
    """Insert rows in their order, except those that exist and copies of an earlier one of them.

    Args:
        longest_wait: for a concurrent duplicate; None keeps the transaction's lock_timeout.
        recorded: the trail gets an entry of each row that has a reason; with `INBOX["TRAIL"] = "all"` of each row.

    Raises:
        ConcurrentDuplicate: a transaction that was waited for did not end in time.
    """
    connection = connections[alias]
    if len(insertions) == 1 and longest_wait and is_usable(connection) and not (recorded and is_recorded(matters=False)):
        (insertion,) = insertions
        if _others_of(insertion) == _OTHER_DEFAULTS:
            return _insert_single(connection, insertion, longest_wait)
    if not is_postgresql(connection):
        return _insert_each(connection, insertions, recorded=recorded)
    bound = None if longest_wait is None else as_bound(longest_wait)
    documents = [_document(insertion) for insertion in insertions]
    entries = _entries(insertions) if recorded else {}
    for number, entry in entries.items():
        documents[number]["entry"] = entry
    bodies = [insertion.row.body for insertion in insertions]
    given: list[Any] = [bound, json.dumps(documents, default=datetime.isoformat), bodies]
    given += [this_process()] if entries else []
    with locked_means_busy:
        if is_usable(connection):
            connection.validate_no_broken_transaction()
            found = (_MANY_RECORDED if entries else _MANY).fetch(connection, given)
        else:
            sql = _insert_many("%s", binary(connection), "%s", "%s::text" if entries else "")
            found = fetch_all(connection, sql, given)
    ((ids, biz_ids, states, transaction, _),) = found
    rows = zip(biz_ids or (), zip(ids or (), states or (), strict=True), strict=True)
    return Inserted(rows=dict(rows), ids=ids or (), transaction=transaction)


def _insert_each(connection: BaseDatabaseWrapper, insertions: Sequence[Insertion], *, recorded: bool) -> Inserted:
    rows: dict[str, tuple[int, str]] = {}
    ids: list[int] = []
    entries = _entries(insertions)
    with transaction.atomic(using=connection.alias, savepoint=False), connection.cursor() as cursor:
        for index, insertion in enumerate(insertions):
            cursor.execute(_RECEIPT_ON_SQLITE, _copied_of(insertion.row))
            for (row,) in cursor.fetchall():
                given = [getattr(insertion.row if column in COLUMNS else insertion, column) for column in _GIVEN]
                cursor.execute(_MESSAGE_ON_SQLITE, [row, *(adapted(connection, value) for value in given)])
                rows[insertion.row.biz_id] = row, cursor.fetchone()[0]
                ids.append(row)
                if recorded and index in entries:
                    record(connection.alias, [row], was="", reason=entries[index])
    return Inserted(rows=rows, ids=ids, transaction="")


def _entries(insertions: Sequence[Insertion]) -> dict[int, str]:
    """By its index, the reason of each row that the trail records."""
    matter = [bool(insertion.last_error) and insertion.error_class != DEFERRED for insertion in insertions]
    return {index: insertions[index].last_error for index, matters in enumerate(matter) if is_recorded(matters=matters)}


def _document(insertion: Insertion) -> dict[str, Any]:
    """The row in the JSON document, without its body and without defaults."""
    values: dict[str, Any] = dict(zip(_TEXTS, _texts_of(insertion.row), strict=True))
    values["state"] = insertion.state
    optional = zip(_OPTIONAL, _optional_of(insertion), strict=True)
    values.update([(column, value) for column, value in optional if value != _DEFAULTS[column]])
    return values
