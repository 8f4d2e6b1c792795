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
from typing import Annotated, Any, NamedTuple, TypedDict, Unpack, get_type_hints

from django.db import OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from exactly_once.failures import DEFERRED
from exactly_once.sql.connections import execute, fetch, is_postgresql
from exactly_once.sql.days import DAY_OF_NOW, LIVE
from exactly_once.sql.now import NOW, NOW_AFTER
from exactly_once.sql.prepared_statements import PLANNED_SINGLY, Prepared, PreparedStatement, Rows, is_usable
from inbox import deaths
from inbox.conf import inbox_options
from inbox.states import INSERTED, State
from inbox.store.dead_letters import report
from inbox.store.dialect import RECEIPTS, TABLE, adapted, as_bound, locked_means_busy, raise_if_busy, run
from inbox.store.duplicates import count_duplicate
from inbox.store.failure_columns import FIRST_ATTEMPT, as_inserted
from inbox.store.message_rows import COLUMNS, Earlier, Failure, Guard, NewRow, columns_of, emptied
from inbox.store.ordering import OPEN, hold_gates, promote_next
from inbox.store.sentinel import SET_SAVEPOINT
from inbox.store.trail_entries import ENTRY, record, this_process


class Values(TypedDict, total=False):
    """What a row is inserted with besides the columns of its delivery, each with PostgreSQL's type."""

    leads: Annotated[bool, "boolean"]
    """It is the first of its ordering key in its load, and is not `waiting` but `received` if no open row precedes it."""
    due_after: Annotated[float | None, "float8"]
    """Seconds until it is due; a row that waits behind another is not due. None: it is not due at all."""
    attempts: Annotated[int, "int"]
    fence: Annotated[int, "bigint"]
    ordered: Annotated[bool, "boolean"]
    place: Annotated[int | None, "bigint"]
    replaces_id: Annotated[int, "bigint"]
    """The dead row whose payload an operator has corrected."""
    quarantined: Annotated[bool, "boolean"]
    last_error: Annotated[str, "text"]
    error_class: Annotated[str, "text"]
    error_place: Annotated[str, "text"]
    attempt: Annotated[str | None, "text"]
    """Its first failed attempt, as JSON, see `failures`."""
    traceback: Annotated[str, "text"]
    result: Annotated[str | None, "text"]
    """What its handler returned, as JSON."""


class Insertion(NamedTuple):
    """A row to insert."""

    row: NewRow
    state: State
    values: Values


_VALUES = {name: hint.__metadata__[0] for name, hint in get_type_hints(Values, include_extras=True).items()}
_ENDED, _IN_HISTORY = (
    ", ".join(f"'{state}'" for one in INSERTED if column in one.sets for state in one.targets)
    for column in ("settled_at", "day")
)

_MESSAGE = """
INSERT INTO {table} (
    id, handler, topic, biz_id, message_id, key, content_type, digest, headers, source, correlation_id, causation_id,
    traceparent, created_at, body, state, attempts, fence, ordered, place, replaces_id, quarantined, result,
    received_at, settled_at, day, next_attempt_at,
    last_error, error_class, error_place, traceback, failing_since, failed_at, failures
)
SELECT
    id, handler, topic, biz_id, message_id, key, content_type, digest, {headers}, source, correlation_id, causation_id,
    traceparent, created_at, body, became, COALESCE(attempts, 0), COALESCE(fence, 0), COALESCE(ordered, false), place,
    replaces_id, COALESCE(quarantined, false), {result},
    {now},
    CASE WHEN became IN ({ended}) THEN {now} END,
    CASE WHEN became IN ({in_history}) THEN {today} ELSE {live} END,
    CASE WHEN due_after IS NOT NULL AND became <> 'waiting' THEN {due_at} END,
    COALESCE(last_error, ''), COALESCE(error_class, ''), COALESCE(error_place, ''), COALESCE(traceback, ''),
    {failed_at}, {failed_at}, CASE WHEN attempt IS NOT NULL THEN {first_attempt} END
FROM {given}
"""
"""Insert messages from `given`, which has their id, `COLUMNS`, `Values`, and the state that they get."""
_FAILED_AT = f"CASE WHEN became IN ('retrying', 'dead') AND COALESCE(error_class, '') NOT IN ('', '{DEFERRED}') THEN {{}} END"
_BECAME = f"""
CASE WHEN COALESCE(load.leads, false) AND load.state = 'waiting' AND NOT EXISTS (
    SELECT 1 FROM {TABLE} m WHERE m.handler = load.handler AND m.key = load.key AND {OPEN}
) THEN 'received' ELSE load.state END
"""


def _message(vendor: str, given: str, cast: str = "") -> str:
    return _MESSAGE.format(
        table=TABLE,
        given=given,
        ended=_ENDED,
        in_history=_IN_HISTORY,
        live=LIVE,
        headers=f"headers{cast}",
        result=f"result{cast}",
        now=NOW[vendor],
        today=DAY_OF_NOW[vendor],
        due_at=NOW_AFTER[vendor].replace("%s", "due_after"),
        failed_at=_FAILED_AT.format(NOW[vendor]),
        first_attempt=FIRST_ATTEMPT[vendor].format("attempt"),
    )


_ONE_ROW = dict.fromkeys(("attempts", "fence", "due_after", "result")).keys()
"""The `Values` that the statement for a single row takes."""
_ONE = PreparedStatement(
    "inbox_begin",
    [*COLUMNS.values(), "varchar", "int", "bigint", "float8", "jsonb", "text"],
    f"""
    WITH bound AS MATERIALIZED (
        SELECT current_setting('lock_timeout') AS before, set_config('lock_timeout', $20, true)
    ), receipt AS (
        INSERT INTO {RECEIPTS} (handler, topic, biz_id, message_id, digest, received_at)
        SELECT $1, $2, $3, $4, $7, statement_timestamp() FROM bound
        ON CONFLICT (handler, topic, biz_id) DO NOTHING RETURNING id
    ), message AS (
        INSERT INTO {TABLE} (
            id, {", ".join(COLUMNS)}, state, attempts, fence, next_attempt_at, result,
            received_at, settled_at, day
        )
        SELECT
            id, {", ".join(f"${number}" for number, _ in enumerate(COLUMNS, 1))}, $15, COALESCE($16, 0), COALESCE($17, 0),
            statement_timestamp() + make_interval(secs => $18), $19,
            statement_timestamp(),
            CASE WHEN $15 IN ({_ENDED}) THEN statement_timestamp() END,
            CASE WHEN $15 IN ({_IN_HISTORY}) THEN {DAY_OF_NOW["postgresql"]} ELSE {LIVE} END
        FROM receipt
    )
    SELECT receipt.id, pg_current_xact_id()::text, set_config('lock_timeout', bound.before, true)
    FROM bound LEFT JOIN receipt ON true
    """,
)
"""One round trip: bound the wait for a concurrent duplicate, insert, restore the transaction's own lock_timeout."""

_TEXTS = [column for column in COLUMNS if column != "body"]
_READ = {column: f"COALESCE({column}, '') AS {column}" for column in _TEXTS}
# A single empty text is split into nothing, and therefore NULL. A missing instant is Python's None.
_READ["created_at"] = "nullif(created_at, 'None')::timestamptz AS created_at"
_DOCUMENT = {"state": "varchar", **_VALUES, "entry": "text"}
"""The values of a row in a JSON document: what `Values` says, and the reason in its trail entry."""
_SEPARATOR = "\x1f"
"""Between the values of a column. A name has no control characters, and JSON escapes them."""


def _many(name: str, became: str, *, entries: str = "", **options: Any) -> PreparedStatement:
    """Insert a load in one round trip that limits the wait for a lock, inserts, and restores the transaction's lock_timeout.

    The aggregates ensure that all receipts are inserted before that. A row is returned also if none is inserted. Receipts are
    numbered before they are inserted, so that of two copies only the first has the id of a receipt.

    Args:
        became: the state that a row gets.
        entries: writes the entries of the trail.
        options: of the `PreparedStatement`.
    """
    bodies, documents, process = (f"${len(_TEXTS) + number}" for number in (3, 4, 5))
    text = f"""
    WITH bound AS MATERIALIZED (
        SELECT current_setting('lock_timeout') AS before,
            set_config('lock_timeout', COALESCE($1, current_setting('lock_timeout')), true)
    ), load AS (
        SELECT {", ".join(_READ.values())}, body, {", ".join(_DOCUMENT)}, number
        FROM ROWS FROM (
            {", ".join(f"unnest(string_to_array(${number}, $2))" for number, _ in enumerate(_TEXTS, 3))},
            unnest({bodies}),
            json_to_recordset({documents}) AS ({", ".join(map(" ".join, _DOCUMENT.items()))})
        ) WITH ORDINALITY AS load({", ".join([*_TEXTS, "body", *_DOCUMENT])}, number)
    ), given AS MATERIALIZED (
        SELECT nextval('{RECEIPTS}_id_seq') AS id, load.*, {became} AS became
        FROM (SELECT * FROM load ORDER BY number) AS load
    ), receipt AS (
        INSERT INTO {RECEIPTS} (id, handler, topic, biz_id, message_id, digest, received_at)
        SELECT id, handler, topic, biz_id, message_id, digest, statement_timestamp() FROM bound, given ORDER BY number
        ON CONFLICT (handler, topic, biz_id) DO NOTHING RETURNING id
    ), new AS MATERIALIZED (
        SELECT given.* FROM given JOIN receipt USING (id)
    ), message AS (
        {_message("postgresql", "new", "::jsonb")}
    ){entries.format(process)}
    SELECT indexes, ids, states, pg_current_xact_id()::text, set_config('lock_timeout', bound.before, true)
    FROM bound, (
        SELECT array_agg(number - 1 ORDER BY id) AS indexes, array_agg(id ORDER BY id) AS ids,
            array_agg(became ORDER BY id) AS states
        FROM new
    ) AS inserted
    """
    return PreparedStatement(name, [*["text"] * (2 + len(_TEXTS)), "bytea[]", "json", "text"], text, **options)


_ENTRIES = f""", entry AS (
    {ENTRY} SELECT message_id, handler, '', became, statement_timestamp(), {{}}, entry FROM new WHERE entry IS NOT NULL
)"""
_MANY = _many("inbox_insert", "load.state")
# These read the table, which a load may fill: see PreparedStatement.
_MANY_ORDERED = _many("inbox_insert_ordered", _BECAME, most_runs=PLANNED_SINGLY)
_MANY_RECORDED = _many("inbox_insert_recorded", _BECAME, entries=_ENTRIES, most_runs=PLANNED_SINGLY)

_RECEIPT_ON_SQLITE = f"""
INSERT INTO {RECEIPTS} (handler, topic, biz_id, message_id, digest, received_at)
VALUES (%(handler)s, %(topic)s, %(biz_id)s, %(message_id)s, %(digest)s, {NOW["sqlite"]})
ON CONFLICT (handler, topic, biz_id) DO NOTHING RETURNING id
"""
_GIVEN_ON_SQLITE = ["id", *COLUMNS, "state", *_VALUES]
_LOAD_ON_SQLITE = f"(SELECT {', '.join(f'%({name})s AS {name}' for name in _GIVEN_ON_SQLITE)}) AS load"
_MESSAGE_ON_SQLITE = _message("sqlite", f"(SELECT load.*, {_BECAME} AS became FROM {_LOAD_ON_SQLITE})") + "RETURNING state"


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
    is_read = connection.vendor == "postgresql" and len(connection.atomic_blocks) == 1
    is_emptied = not inbox_options().keeps_successes
    values: Values = {"attempts": attempt, "result": result}
    order = in_lock_order(rows) if len(rows) > 1 else range(1)
    insertions = [Insertion(emptied(rows[index]) if is_emptied else rows[index], State.DONE, values) for index in order]
    then = limits if is_read else [SET_SAVEPOINT, *(limits[:1] if is_postgresql(connection) else ())]
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


def insertion_of(
    row: NewRow, state: State, longest_wait: timedelta, **values: Unpack[Values]
) -> tuple[PreparedStatement, Sequence[Any]]:
    """What `insert_one` executes. Its answer begins with the id, or NULL if the row exists."""
    return _ONE, [*columns_of(row), state, *map(values.get, _ONE_ROW), as_bound(longest_wait)]


def begun(connection: BaseDatabaseWrapper, row: NewRow, answer: Callable[[], Rows]) -> Guard | None:
    """What `begin_fresh` returns and raises, by the answer to the `first_statement`."""
    with locked_means_busy:
        ((pk, transaction_id, _),) = answer()
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
    if not (deaths.reported and state is State.DEAD):
        return insert_one(alias, row, state, duplicate_timeout, **as_inserted(failure)) is not None
    with transaction.atomic(using=alias):
        pk = insert_one(alias, row, state, duplicate_timeout, **as_inserted(failure))
        report(alias, [pk] if pk else [])
    return pk is not None


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
    try:
        if len(insertions) == 1 and bound and not entries and values.keys() <= _ONE_ROW and is_usable(connection):
            connection.validate_no_broken_transaction()
            given = [*columns_of(row), state, *map(values.get, _ONE_ROW), bound]
            ((pk, transaction_id, _),) = _ONE.execute(connection, given, then=then).rows
            return ({}, "") if pk is None else ({0: (int(pk), state)}, transaction_id)
        if not is_postgresql(connection):
            return _insert_each(connection, insertions, entries, then)
        return _insert_load(connection, insertions, entries, bound, then)
    except OperationalError as error:  # not as `locked_means_busy`: this is on the way of each message
        raise_if_busy(error)
        raise


def _insert_load(
    connection: BaseDatabaseWrapper,
    insertions: Sequence[Insertion],
    entries: Mapping[int, str],
    bound: str | None,
    then: Sequence[bytes],
) -> tuple[Mapping[int, tuple[int, str]], str]:
    *names, created, bodies = zip(*[columns_of(row) for row, _, _ in insertions], strict=True)
    texts = [*names, [*map(str, created)]]
    mark = str(uuid.uuid4()) if _SEPARATOR in "".join(map("".join, texts)) else _SEPARATOR
    documents = [{"state": state, "entry": entries.get(n), **others} for n, (_, state, others) in enumerate(insertions)]
    given = [bound, mark, *map(mark.join, texts), [*bodies], json.dumps(documents), this_process() if entries else ""]
    statement = _MANY_RECORDED if entries else _MANY_ORDERED if "leads" in insertions[0].values else _MANY
    ((indexes, ids, states, transaction_id, _),) = run(statement, connection, given, then=then)
    return dict(zip(indexes or (), zip(ids or (), states or (), strict=True), strict=True)), transaction_id


def _insert_each(
    connection: BaseDatabaseWrapper, insertions: Sequence[Insertion], entries: Mapping[int, str], then: Sequence[bytes]
) -> tuple[Mapping[int, tuple[int, str]], str]:
    rows: dict[int, tuple[int, str]] = {}
    with transaction.atomic(using=connection.alias, savepoint=False):
        for index, (row, state, values) in enumerate(insertions):
            given = [None, *columns_of(row), state, *map(values.get, _VALUES)]
            named = {name: adapted(connection, value) for name, value in zip(_GIVEN_ON_SQLITE, given, strict=True)}
            for (pk,) in fetch(connection, _RECEIPT_ON_SQLITE, named):
                ((became,),) = fetch(connection, _MESSAGE_ON_SQLITE, {**named, "id": pk})
                rows[index] = pk, became
                if index in entries:
                    record(connection.alias, [pk], was="", reason=entries[index])
        for one in then:
            execute(connection, one.decode())
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
    if deaths.reported:
        report(alias, [pk for pk, state in inserted.values() if state == State.DEAD])
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
