"""New messages: one statement inserts receipts, and the messages of those that are new.

`begin_fresh` inserts the rows of deliveries in the transaction of their handlers, which has nothing to write after them but its
effect. All other rows are inserted to be run later: `admit` stores the deliveries of one handler in their order.

On PostgreSQL a load of any size is one statement with the same text, so it is prepared. A parameter for each value would cost
more than the INSERT, so each column is one text, split by the statement; the bodies are one array, and what differs from a
default is one JSON document. The fast path has a single row and gives its values as parameters. SQLite saves no round trips and
gets one statement for each row.

The rows are numbered in the order in which they are given. Rows that exist already are left out.
"""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Annotated, NamedTuple, TypedDict, Unpack, get_type_hints

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from exactly_once.failures import DEFERRED
from exactly_once.sql.connections import is_outermost, is_postgresql
from exactly_once.sql.days import DAY_OF_NOW, LIVE
from exactly_once.sql.now import NOW, NOW_AFTER
from exactly_once.sql.prepared_statements import PLANNED_SINGLY, Prepared, PreparedStatement, StatementResult, is_usable
from inbox.conf import inbox_options
from inbox.states import INSERTED, State
from inbox.store.dialect import BOUND, RECEIPTS, TABLE, UNBOUND, adapted, as_bound, locked_means_busy, run
from inbox.store.duplicates import count_duplicate
from inbox.store.failure_columns import FIRST_ATTEMPT, as_inserted
from inbox.store.message_rows import COLUMNS, Earlier, Failure, Guard, NewRow, columns_of, emptied
from inbox.store.ordering import OPEN, hold_gates, promote_next
from inbox.store.sentinel import SET_SAVEPOINT
from inbox.store.trail_entries import ENTRY, record, this_process


class Values(TypedDict, total=False):
    """What a row is inserted with besides the columns of its delivery: each with PostgreSQL's type, and its default."""

    leads: Annotated[bool, "boolean", "false"]
    """It is the first of its ordering key in its load, and is not `waiting` but `received` if no open row precedes it."""
    due_after: Annotated[float | None, "float8", "NULL"]
    """Seconds until it is due; a row that waits behind another is not due. None: it is not due at all."""
    attempts: Annotated[int, "int", "0"]
    fence: Annotated[int, "bigint", "0"]
    ordered: Annotated[bool, "boolean", "false"]
    place: Annotated[int | None, "bigint", "NULL"]
    replaces_id: Annotated[int, "bigint", "NULL"]
    """The dead row whose payload an operator has corrected."""
    quarantined: Annotated[bool, "boolean", "false"]
    last_error: Annotated[str, "text", "''"]
    error_class: Annotated[str, "text", "''"]
    error_place: Annotated[str, "text", "''"]
    attempt: Annotated[str | None, "text", "NULL"]
    """Its first failed attempt, as JSON, see `failures`."""
    traceback: Annotated[str, "text", "''"]
    result: Annotated[str | None, "text", "NULL"]
    """What its handler returned, as JSON."""


class Insertion(NamedTuple):
    """A row to insert."""

    row: NewRow
    state: State
    values: Values


_OPTIONAL = {name: hint.__metadata__ for name, hint in get_type_hints(Values, include_extras=True).items()}
"""Type and default of each of the `Values`. A source gives NULL for the default."""
_TEXTS = [column for column in COLUMNS if column != "body"]
_NOT_STORED = {"leads", "due_after", "attempt"}
_DOCUMENT = {"state": "varchar", **{column: kind for column, (kind, _) in _OPTIONAL.items()}, "entry": "text"}
"""The values of a row in a JSON document, with PostgreSQL's types: what `Values` says, and the reason in its trail entry."""
_SEPARATOR = "\x1f"
"""Between the values of a column. A name has no control characters, and JSON escapes them."""


def _inserted_with(column: str) -> str:
    """The states of new rows that have a value in this column."""
    return ", ".join(f"'{state}'" for one in INSERTED if column in one.sets for state in one.targets)


def _insert(vendor: str, source: str) -> str:
    """Insert messages from a relation with `id`, `COLUMNS`, `Values`, and `became`, the state that they get."""
    at = NOW[vendor]
    values = {
        "id": "given.id",
        **{column: f"given.{column}" for column in COLUMNS},
        **{column: f"COALESCE(given.{column}, {default})" for column, (_, default) in _OPTIONAL.items()},
        "state": "given.became",
        "received_at": at,
        "settled_at": f"CASE WHEN given.became IN ({_inserted_with('settled_at')}) THEN {at} END",
        "day": f"CASE WHEN given.became IN ({_inserted_with('day')}) THEN {DAY_OF_NOW[vendor]} ELSE {LIVE} END",
        "next_attempt_at": "CASE WHEN given.due_after IS NOT NULL AND given.became <> 'waiting' "
        f"THEN {NOW_AFTER[vendor].replace('%s', 'given.due_after')} END",
    }
    fails = f"given.became IN ('retrying', 'dead') AND COALESCE(given.error_class, '') NOT IN ('', '{DEFERRED}')"
    values["failing_since"] = values["failed_at"] = f"CASE WHEN {fails} THEN {at} END"
    values["failures"] = f"CASE WHEN given.attempt IS NOT NULL THEN {FIRST_ATTEMPT[vendor].format('given.attempt')} END"
    if vendor == "postgresql":
        values["headers"] += "::jsonb"
        values["result"] += "::jsonb"
    stored = [column for column in values if column not in _NOT_STORED]
    return f"INSERT INTO {TABLE} ({', '.join(stored)}) SELECT {', '.join(values[column] for column in stored)} FROM {source}"


_COPIED = "handler, topic, biz_id, message_id, digest"
_ONCE = "ON CONFLICT (handler, topic, biz_id) DO NOTHING RETURNING id"
_PRECEDES = f"SELECT 1 FROM {TABLE} m WHERE m.handler = source.handler AND m.key = source.key AND {OPEN}"
_BECAME = (
    f"CASE WHEN COALESCE(source.leads, false) AND source.state = 'waiting' AND NOT EXISTS ({_PRECEDES}) THEN 'received' "
    "ELSE source.state END"
)


def _values_of_one(given: Mapping[str, str]) -> str:
    """One row as a source: the expressions that are given, and the defaults of the other values."""
    absent = {column: f"{default}::{kind}" for column, (kind, default) in _OPTIONAL.items() if column not in given}
    return f"(SELECT {', '.join(f'{value} AS {column}' for column, value in {**given, **absent}.items())}) AS source"


_LOAD_TYPES = [*["text"] * (2 + len(_TEXTS)), "bytea[]", "json", "text"]
_BODIES, _DOCUMENTS, _PROCESS = (f"${len(_TEXTS) + number}" for number in (3, 4, 5))
_SOURCE = ", ".join(f"unnest(string_to_array(${number}, $2))" for number, _ in enumerate(_TEXTS, 3))
_SOURCE += f", unnest({_BODIES}), json_to_recordset({_DOCUMENTS}) AS ({', '.join(map(' '.join, _DOCUMENT.items()))})"
# A single empty text is split into nothing, and therefore NULL. A missing instant is Python's None.
_READ = {column: f"coalesce({column}, '')" for column in _TEXTS} | {"created_at": "nullif(created_at, 'None')::timestamptz"}
_ENTRIES = (
    f", entry AS ({ENTRY} SELECT message_id, handler, '', became, statement_timestamp(), {_PROCESS}, entry FROM new "
    "WHERE entry IS NOT NULL)"
)


def _many(became: str, entries: str = "") -> str:
    """Insert a load in one round trip that limits the wait for a lock, inserts, and restores the transaction's lock_timeout.

    The aggregates ensure that all receipts are inserted before that. A row is returned also if none is inserted. Receipts are
    numbered before they are inserted, so that of two copies only the first has the id of a receipt.

    Args:
        became: the state that a row gets.
        entries: writes the entries of the trail.
    """
    return BOUND.replace("%s", "coalesce($1, current_setting('lock_timeout'))") + (
        f", source AS (SELECT {', '.join(f'{value} AS {column}' for column, value in _READ.items())}, "
        f"body, {', '.join(_DOCUMENT)}, number "
        f"FROM ROWS FROM ({_SOURCE}) WITH ORDINALITY AS source({', '.join([*COLUMNS, *_DOCUMENT])}, number)), "
        f"given AS MATERIALIZED (SELECT nextval('{RECEIPTS}_id_seq') AS id, source.*, {became} AS became "
        "FROM (SELECT * FROM source ORDER BY number) AS source), "
        f"receipt AS (INSERT INTO {RECEIPTS} (id, {_COPIED}, received_at) "
        f"SELECT id, {_COPIED}, statement_timestamp() FROM bound, given ORDER BY number {_ONCE}), "
        "new AS MATERIALIZED (SELECT given.* FROM given JOIN receipt USING (id)), "
        f"message AS ({_insert('postgresql', 'new AS given')}){entries} "
        f"SELECT indexes, ids, states, pg_current_xact_id()::text, {UNBOUND} FROM bound, "
        "(SELECT array_agg(number - 1 ORDER BY id) AS indexes, array_agg(id ORDER BY id) AS ids, "
        "array_agg(became ORDER BY id) AS states FROM new) AS inserted"
    )


_MANY = PreparedStatement("inbox_insert", _LOAD_TYPES, _many("source.state"))
# These read the table, which a load may fill: see PreparedStatement.
_MANY_ORDERED = PreparedStatement("inbox_insert_ordered", _LOAD_TYPES, _many(_BECAME), most_runs=PLANNED_SINGLY)
_MANY_RECORDED = PreparedStatement("inbox_insert_recorded", _LOAD_TYPES, _many(_BECAME, _ENTRIES), most_runs=PLANNED_SINGLY)
_RECEIPT_ON_SQLITE = f"INSERT INTO {RECEIPTS} ({_COPIED}, received_at) VALUES (%s, %s, %s, %s, %s, {NOW['sqlite']}) {_ONCE}"
_GIVEN_ON_SQLITE = dict.fromkeys(["id", *COLUMNS, "state", *_OPTIONAL], "%s")
_GIVEN_ALONE = f"(SELECT source.*, {_BECAME} AS became FROM {_values_of_one(_GIVEN_ON_SQLITE)}) AS given"
_MESSAGE_ON_SQLITE = f"{_insert('sqlite', _GIVEN_ALONE)} RETURNING state"
_copied_of = attrgetter(*_COPIED.split(", "))
_ONE_ROW = dict.fromkeys(("attempts", "fence", "due_after", "result")).keys()
"""The `Values` that the statement for a single row takes."""
_TYPES = {**COLUMNS, "state": "varchar", **{name: _OPTIONAL[name][0] for name in _ONE_ROW}}
_PLACES = {name: f"${number}::{kind}" for number, (name, kind) in enumerate(_TYPES.items(), 1)}
# One round trip: bound the wait for a concurrent duplicate, insert, restore the transaction's own lock_timeout.
_NEW_ONE = f"(SELECT receipt.id, source.*, state AS became FROM receipt, {_values_of_one(_PLACES)}) AS given"
_ONE = PreparedStatement(
    "inbox_begin",
    [*_TYPES.values(), "text"],
    f"{BOUND.replace('%s', f'${len(_TYPES) + 1}')}, receipt AS (INSERT INTO {RECEIPTS} ({_COPIED}, received_at) "
    f"SELECT {', '.join(_PLACES[column] for column in _COPIED.split(', '))}, statement_timestamp() FROM bound {_ONCE}), "
    f"message AS ({_insert('postgresql', _NEW_ONE)}) "
    f"SELECT receipt.id, pg_current_xact_id()::text, {UNBOUND} FROM bound LEFT JOIN receipt ON true",
)


def begin_fresh(
    alias: str,
    rows: Sequence[NewRow],
    duplicate_timeout: timedelta,
    *,
    attempt: int = 1,
    result: str | None = None,
    limits: Sequence[bytes] = (),
) -> Guard | None:
    """∅ → done, as the first statement of the handlers' transaction. None: all rows exist, or are duplicates of each other.

    No other transaction sees the rows before the commit, and then their state is true; so they are written once. Where the
    sentinel cannot read which transaction inserted them (in a savepoint, on SQLite), another savepoint proves it.

    Args:
        result: the handler's expected result as JSON, so that a handler with this result need not write the row again.
        limits: statements that bound the transaction of the handlers.

    Raises:
        ConcurrentDuplicate: another transaction is inserting one of them and did not end within `duplicate_timeout`.
    """
    connection = connections[alias]
    is_read = is_postgresql(connection) and is_outermost(connection)
    is_emptied = not inbox_options().keeps_successes
    values: Values = {"attempts": attempt, "result": result}
    order = in_lock_order(rows) if len(rows) > 1 else range(1)
    insertions = [Insertion(emptied(rows[index]) if is_emptied else rows[index], State.DONE, values) for index in order]
    then = [*([] if is_read else [SET_SAVEPOINT]), *(limits if is_postgresql(connection) else ())]
    inserted, transaction_id = insert_many(alias, insertions, duplicate_timeout, recorded=False, then=then)
    if not inserted:
        return None
    # Of two copies, the first is begun.
    ids: dict[int, int] = {}
    for index, (pk, _) in inserted.items():
        ids[order[index]] = pk
    begun = sorted(ids)
    return Guard(
        connection,
        tuple(map(ids.__getitem__, begun)),
        transaction_id if is_read else "",
        tuple(begun),
        emptied=tuple([rows[index] for index in begun]) if is_emptied else (),
        result=result,
    )


def first_statement(row: NewRow, duplicate_timeout: timedelta, limits: Sequence[bytes]) -> Prepared:
    """What `begin_fresh` executes for one row in a transaction of its own."""
    stored = row if inbox_options().keeps_successes else emptied(row)
    return _ONE, [*columns_of(stored), State.DONE, 1, None, None, None, as_bound(duplicate_timeout)], limits


def begun(connection: BaseDatabaseWrapper, row: NewRow, answer: Callable[[], StatementResult]) -> Guard | None:
    """What `begin_fresh` returns and raises, by the answer to the `first_statement`."""
    with locked_means_busy:
        ((pk, transaction_id, _),) = answer().rows
    if pk is None:
        return None
    content = () if inbox_options().keeps_successes else (row,)
    return Guard(connection, (int(pk),), transaction_id, (0,), emptied=content)


def in_lock_order(rows: Sequence[NewRow]) -> Sequence[int]:
    """The indexes of rows of one handler in an order that is the same everywhere.

    Two transactions that insert copies of the same messages in this order do not deadlock.
    """
    names = [(row.biz_id, row.topic) for row in rows]
    return sorted(range(len(rows)), key=names.__getitem__)


def store_due(alias: str, row: NewRow, duplicate_timeout: timedelta, *, after: timedelta = timedelta()) -> bool:
    """∅ → received, due now or `after` a delay, for the runner. False: the row exists.

    Raises:
        ConcurrentDuplicate: see `begin_fresh`.
    """
    return insert_one(alias, row, State.RECEIVED, duplicate_timeout, due_after=after.total_seconds()) is not None


def store_failed(alias: str, row: NewRow, failure: Failure, duplicate_timeout: timedelta) -> bool:
    """∅ → retrying | dead, after the handler's transaction was rolled back. False: the row exists.

    Raises:
        ConcurrentDuplicate: see `begin_fresh`.
    """
    state = State.DEAD if failure.retry_after is None else State.RETRYING
    return insert_one(alias, row, state, duplicate_timeout, **as_inserted(failure)) is not None


def insert_one(
    alias: str, row: NewRow, state: State, longest_wait: timedelta, *, recorded: bool = True, **values: Unpack[Values]
) -> int | None:
    """Insert one row; its id. None: it exists.

    Raises:
        ConcurrentDuplicate: another transaction is inserting the same row and did not end within `longest_wait`.
    """
    rows, _ = insert_many(alias, [Insertion(row, state, values)], longest_wait, recorded=recorded)
    return rows[0][0] if rows else None


def insert_many(
    alias: str,
    insertions: Sequence[Insertion],
    longest_wait: timedelta | None = None,
    *,
    recorded: bool = True,
    then: Sequence[bytes] = (),
) -> tuple[Mapping[int, tuple[int, str]], str]:
    """Insert rows in their order, except those that exist and copies of an earlier one of them.

    Args:
        longest_wait: for a concurrent duplicate; None keeps the transaction's lock_timeout.
        recorded: the trail gets an entry of each row that has a reason; with `INBOX["TRAIL"] = "all"` of each row.
        then: see `dialect.run`.

    Returns:
        of the rows that did not exist, by their index, the id and the state; and the id of the transaction, "" on SQLite.

    Raises:
        ConcurrentDuplicate: a transaction that was waited for did not end in time.
    """
    connection, bound = connections[alias], None if longest_wait is None else as_bound(longest_wait)
    row, state, values = insertions[0]
    entries = _entries(insertions) if recorded else {}
    with locked_means_busy:
        if len(insertions) == 1 and bound and not entries and values.keys() <= _ONE_ROW and is_usable(connection):
            connection.validate_no_broken_transaction()
            given = [*columns_of(row), state, *map(values.get, _ONE_ROW), bound]
            ((pk, transaction_id, _),) = _ONE.execute(connection, given, then=then).rows
            return ({}, "") if pk is None else ({0: (int(pk), state)}, transaction_id)
        if not is_postgresql(connection):
            return _insert_each(connection, insertions, entries, then)
        *names, created, bodies = zip(*[columns_of(row) for row, _, _ in insertions], strict=True)
        texts = [*names, [*map(str, created)]]
        mark = str(uuid.uuid4()) if _SEPARATOR in "".join(map("".join, texts)) else _SEPARATOR
        documents = [{"state": state, "entry": entries.get(n), **others} for n, (_, state, others) in enumerate(insertions)]
        given = [bound, mark, *map(mark.join, texts), [*bodies], json.dumps(documents), this_process() if entries else ""]
        statement = _MANY_RECORDED if entries else _MANY_ORDERED if "leads" in values else _MANY
        ((indexes, ids, states, transaction_id, _),) = run(statement, connection, given, then=then)
    return dict(zip(indexes or (), zip(ids or (), states or (), strict=True), strict=True)), transaction_id


def _insert_each(
    connection: BaseDatabaseWrapper, insertions: Sequence[Insertion], entries: Mapping[int, str], then: Sequence[bytes]
) -> tuple[Mapping[int, tuple[int, str]], str]:
    rows: dict[int, tuple[int, str]] = {}
    with transaction.atomic(using=connection.alias, savepoint=False), connection.cursor() as cursor:
        for index, (row, state, values) in enumerate(insertions):
            cursor.execute(_RECEIPT_ON_SQLITE, _copied_of(row))
            for (pk,) in cursor.fetchall():
                given = [*columns_of(row), state, *map(values.get, _OPTIONAL)]
                cursor.execute(_MESSAGE_ON_SQLITE, [pk, *(adapted(connection, value) for value in given)])
                rows[index] = pk, cursor.fetchone()[0]
                if index in entries:
                    record(connection.alias, [pk], was="", reason=entries[index])
        for one in then:
            cursor.execute(one.decode())
    return rows, ""


def _entries(insertions: Sequence[Insertion]) -> dict[int, str]:
    """By its index, the reason of each row that the trail records."""
    entries, is_every = {}, inbox_options().records_all
    for index, (_, _, values) in enumerate(insertions):
        reason = values.get("last_error", "")
        if is_every or (reason and values.get("error_class") != DEFERRED):
            entries[index] = reason
    return entries


Admitted = State | Earlier | None
"""The state that a delivery was stored in, or the row that it is a duplicate of. None: that row is being run, so that the
duplicate could not be counted."""


def admit(alias: str, insertions: Sequence[Insertion]) -> list[Admitted]:
    """∅ → received, due now; ∅ → waiting, in order and behind another of its key; ∅ → dead if refused; ∅ → shed.

    For deliveries of one handler, in their order, inside a transaction of `ordering.deciding` or one like it.

    Raises:
        ConcurrentDuplicate: another transaction held a lock for longer than this one's lock_timeout. Roll back and try again.
    """
    if not insertions:
        return []
    handler, insertions = insertions[0].row.handler, _with_leaders(insertions)
    with locked_means_busy:
        hold_gates(alias, handler, [insertion.row.key for insertion in insertions if insertion.values.get("ordered")])
    inserted, _ = insert_many(alias, insertions)
    admitted: list[Admitted] = []
    for index, insertion in enumerate(insertions):
        # Of two copies in one load, the first was inserted, and the second is its duplicate.
        _, state = inserted.get(index, (0, ""))
        admitted.append(State(state) if state else count_duplicate(alias, insertion.row))
    for key in _headless(insertions, admitted):
        promote_next(alias, handler, key)
    return admitted


def _with_leaders(insertions: Sequence[Insertion]) -> Sequence[Insertion]:
    """The first of each ordering key leads its load."""
    if not any(insertion.values.get("ordered") for insertion in insertions):
        return insertions
    seen: set[str] = set()
    leading: list[Insertion] = []
    for row, state, values in insertions:
        leading.append(Insertion(row, state, {**values, "leads": row.key not in seen}))
        if values.get("ordered"):
            seen.add(row.key)
    return leading


def _headless(insertions: Sequence[Insertion], admitted: Sequence[Admitted]) -> list[str]:
    """Keys whose first delivery here was a duplicate, so that the next one, stored as waiting, may be the head."""
    became = list(zip(insertions, admitted, strict=True))
    missing = {given.row.key for given, one in became if given.values.get("leads") and not isinstance(one, State)}
    return sorted(missing & {given.row.key for given, one in became if one is State.WAITING})
