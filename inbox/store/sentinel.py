"""The commit sentinel: the last statement of a handler's transaction proves that this transaction can commit the inbox row.

If a handler has swallowed a database error, Django and PostgreSQL roll back without an exception, and a consumer that
acknowledges would lose the message.
"""

import sqlite3
from collections.abc import Callable, Iterable
from typing import Any

from django.db import DatabaseError, InterfaceError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from exactly_once.sql.connections import execute, fetch, is_outermost, is_postgresql
from exactly_once.sql.days import LIVE
from exactly_once.sql.faults import UNDEFINED_TABLE, is_collision, is_outage, sqlstate_of
from exactly_once.sql.partitions import lately
from exactly_once.sql.prepared_statements import (
    PreparedStatement,
    Rows,
    execute_script,
    is_in_transaction,
    is_usable,
    rows_of,
    run_and_commit,
)
from exactly_once.wire.text import describe
from inbox.conf import inbox_options
from inbox.errors import TransactionBroken, TransactionEnded
from inbox.models import InboxMessage
from inbox.states import FINISH, State
from inbox.store import receipts
from inbox.store.dead_letters import report
from inbox.store.dialect import IS_OPEN, RECEIPTS, TABLE, assignments, message_of, run
from inbox.store.failure_columns import ABANDON_AS
from inbox.store.message_rows import ABANDONED, PARTLY, Guard, Next
from inbox.store.ordering import FOLLOW, GATE, PROMOTE_HEAD, for_follow, for_gate, promote_behind, promote_next
from inbox.store.trail_entries import record

ENDED = f"The handler ended the inbox's transaction: it committed or rolled back without Django. {PARTLY}"
SET_SAVEPOINT = b"SAVEPOINT inbox_guard"
ROLL_BACK_RUN = "ROLLBACK TO SAVEPOINT inbox_guard"
"""What the handler has written is lost, and the lock of its row is kept. It fails if this is not the transaction that began."""
_RELEASE = "RELEASE SAVEPOINT inbox_guard"
_EMPTY = {"postgresql": "''", "sqlite": "x''"}
_DIVISION_BY_ZERO, _NO_SAVEPOINT = "22012", "3B001"
_SAYS_ENDED = {_DIVISION_BY_ZERO, _NO_SAVEPOINT}
_INSUFFICIENT_PRIVILEGE = "42501"
_INSERTED_BY_US = "xmin = pg_current_xact_id()::xid"
# They divide by zero if a row is missing, so that a COMMIT may be sent with them. PostgreSQL plans ANY for each run.
_PROVE_ONE = PreparedStatement(
    "inbox_prove", ["bigint"], f"SELECT 1 / count(*) FROM {RECEIPTS} WHERE id = $1 AND {_INSERTED_BY_US}"
)
_PROVE_MANY = PreparedStatement(
    "inbox_prove_many",
    ["bigint[]"],
    f"SELECT 1 / (count(*) = cardinality($1))::int FROM {RECEIPTS} WHERE id = ANY($1) AND {_INSERTED_BY_US}",
)
_HAS_COMMITTED = "SELECT 1 WHERE pg_xact_status(%s::xid8) = 'committed'"


def written(vendor: str, *, keep: str, result: str = "result") -> str:
    """The SET of a row that is done. If its body is not stored, the digest remains, so conflicting duplicates are found."""
    body = f"CASE WHEN {keep} THEN body ELSE {_EMPTY[vendor]} END"
    headers = f"CASE WHEN {keep} THEN headers ELSE '{{}}' END"
    done = assignments(FINISH.columns, vendor)
    return f"{done}, result = {result}, body = {body}, headers = {headers}"


_FINISH = PreparedStatement(
    "inbox_finish",
    ["bigint", "bigint", "text", "boolean", "jsonb", "bigint", "text", "boolean"],
    f"WITH done AS (UPDATE {TABLE} SET {written('postgresql', keep='$4', result='coalesce($5, result)')} "
    f"WHERE id = $1 AND fence = $2 AND {IS_OPEN} AND pg_current_xact_id()::text = $3 "
    f"RETURNING {GATE.format(gate='$6', bound='$7', ends='$8')}) SELECT 1 / count(*) FROM done",
)
_FINISH_ON_SQLITE = (
    f"UPDATE {TABLE} SET {written('sqlite', keep='%s', result='coalesce(%s, result)')} "
    f"WHERE id = %s AND fence = %s AND {IS_OPEN} RETURNING id"
)


def roll_back_run(guard: Guard) -> None:
    """Undo what the handler of a stored message has done, in its transaction, which goes on.

    Raises:
        django.db.Error: it is not that transaction.
    """
    guard.connection.needs_rollback = False
    execute(guard.connection, ROLL_BACK_RUN)


def finish(
    guard: Guard, result: str | None = None, *, commit: bool = False, following: Next | None = None
) -> Callable[[], Rows] | None:
    """received | retrying → done, as the last statement of the handler's transaction: the commit sentinel. It must hit the row.

    Of rows that were inserted as `done` the receipts are read instead: `xmin` is the transaction that inserted one, and
    PostgreSQL refuses to read in a transaction that can no longer commit. In a savepoint, whose rows have another `xmin`, and
    on SQLite, a savepoint that was set after the INSERT must still exist.

    If a row has a place in an order, the next row is promoted. A successor is claimed. That is not part of the proof.

    Args:
        result: the handler's result as JSON, if it must be stored.
        commit: also commit, in the same round trip, if `can_commit`. The caller's own commit has nothing to do then.
        following: what is to be sent with the commit.

    Returns:
        what waits for the answer to the first statement of the next transaction, if that was sent.

    Raises:
        TransactionBroken: this transaction cannot commit.
        TransactionEnded: this is not the transaction that began.
        django.db.Error: the commit failed, or the database is unavailable. If the session was lost, the commit may have
            succeeded.
    """
    connection = guard.connection
    if connection.closed_in_transaction:
        raise TransactionBroken(
            "The handler returned, but its transaction can no longer commit: it closed the database connection, which rolled "
            "everything back. Remove the call; close_old_connections() is for threads that the handler starts."
        )
    if not guard.transaction:
        refuse_if_ended(guard)
    try:
        connection.validate_no_broken_transaction()
        if commit:
            return _finish_and_commit(connection, guard, result, following)
        if _finish(connection, guard, result) != len(guard.rows):
            raise TransactionEnded(ENDED)
    except (DatabaseError, InterfaceError) as error:
        if sqlstate_of(error) in _SAYS_ENDED and (not commit or _is_open(connection)):
            raise TransactionEnded(ENDED) from error
        if is_outage(error) or is_collision(error) or (commit and not is_in_transaction(connection)):
            raise
        raise TransactionBroken(
            f"The handler returned, but its transaction can no longer commit ({describe(error)}). {_remedy(error)}"
        ) from error
    record(connection.alias, guard.rows, was=guard.claimed.state if guard.claimed else "", matters=FINISH.recorded)
    if guard.order is not None:
        promote_next(connection.alias, *guard.order)
    return None


def _remedy(error: Exception) -> str:
    if sqlstate_of(error) == UNDEFINED_TABLE:
        return "It changed search_path, so the inbox's table is not found. Restore search_path before returning."
    if sqlstate_of(error) == _INSUFFICIENT_PRIVILEGE:
        return "If it changed its role, grant that role the privileges of the inbox's tables, or restore it before returning."
    return (
        "It caught a database error without a savepoint. Let the error propagate, or wrap the statement that may fail in its "
        "own `with transaction.atomic():`."
    )


def _is_open(connection: BaseDatabaseWrapper) -> bool:
    """Was the COMMIT not reached? A handler that has turned autocommit on leaves no transaction."""
    raw: Any = connection.connection
    return is_in_transaction(connection) or raw.autocommit


def can_commit(guard: Guard, result: str | None) -> bool:
    """Is the proof the last statement of a transaction that leaving `atomic()` commits?"""
    connection = guard.connection
    return (
        (guard.claimed is not None or result == guard.result)
        and not (FINISH.recorded or inbox_options().records_all)
        and len(connection.atomic_blocks) == 1
        and connection.commit_on_exit
        and is_usable(connection)
    )


def _finish(connection: BaseDatabaseWrapper, guard: Guard, result: str | None) -> int:
    """How many rows were hit. It divides by zero if none was, where `_FINISH` does."""
    if is_postgresql(connection) and not guard.transaction:
        execute(connection, _RELEASE)
    if guard.claimed is not None:
        if is_postgresql(connection):
            return len(run(_FINISH, connection, _given(guard, guard.claimed, result)))
        keep = inbox_options().keeps_successes
        return len(fetch(connection, _FINISH_ON_SQLITE, [result, keep, keep, guard.claimed.pk, guard.claimed.fence]))
    if result != guard.result:
        return _write_result(guard, guard.rows[0], result)
    if not guard.transaction:
        return len(guard.rows)
    ours = f"SELECT 1 FROM {RECEIPTS} WHERE id = ANY(%s) AND {_INSERTED_BY_US}"
    return len(fetch(connection, ours, [list(guard.rows)]))


def _write_result(guard: Guard, row: int, result: str | None) -> int:
    found = _write_result_on(guard, lately(), row, result)
    return found or _write_result_on(guard, receipts.days_of(guard.connection.alias, [row]).values(), row, result)


def _write_result_on(guard: Guard, days: Iterable[int], row: int, result: str | None) -> int:
    as_json = "%s::jsonb" if is_postgresql(guard.connection) else "%s"
    ours = f"day IN ({', '.join(map(str, {LIVE, *days}))}) AND id = %s" + (
        f" AND {_INSERTED_BY_US}" if guard.transaction else ""
    )
    sql = f"UPDATE {TABLE} SET result = {as_json} WHERE {ours} RETURNING id"
    return len(fetch(guard.connection, sql, [result, row]))


def _given(guard: Guard, claimed: InboxMessage, result: str | None, *, is_followed: bool = False) -> list[Any]:
    """The parameters of `_FINISH`."""
    gate = for_gate(guard.connection, guard.order, is_followed=is_followed)
    return [claimed.pk, claimed.fence, guard.transaction, inbox_options().keeps_successes, result, *gate]


def _finish_and_commit(
    connection: BaseDatabaseWrapper, guard: Guard, result: str | None, following: Next | None
) -> Callable[[], Rows] | None:
    first = None if following is None else following.begin
    if guard.claimed is None:
        one, rows = len(guard.rows) == 1, guard.rows
        proof = (_PROVE_ONE, rows) if one else (_PROVE_MANY, [f"{{{','.join(map(str, rows))}}}"])
        return run_and_commit(connection, [proof], following=first)[1]
    order, successor = guard.order, None if following is None else following.successor
    runs = [(_FINISH, _given(guard, guard.claimed, result, is_followed=successor is not None))]
    if following is not None and successor is not None:
        runs.append((FOLLOW, for_follow(order, successor.claimed_for, following.in_turn)))
        successor.unknown = guard.transaction
    elif order is not None:
        runs.append((PROMOTE_HEAD, [*order]))
    # What a savepoint's subtransaction writes has its number. A row that one transaction has locked and another changed, as its
    # savepoint would be, costs a MultiXact.
    (_, *found), answer = run_and_commit(connection, runs, before=[_RELEASE.encode()], following=first)
    ((head, row, *columns),) = (found and rows_of(connection, found[0])) or [(None, None)]
    if successor is not None:
        successor.unknown = ""
        successor.message = None if row is None else message_of(connection.alias, [row, *columns[:-1]])
    if order is not None and head == State.WAITING and row is None:
        # Its handler is paused, or an operator has just skipped it; see there. Leaving `atomic()` commits this, too.
        if answer is not None:
            answer()
        promote_behind(connection.alias, order)
        return None
    return answer


def is_rolled_back(guard: Guard) -> bool:
    """Roll back the handler's transaction, and find in the same round trip that it has not committed. False: unknown.

    Django's own rollback finds no open transaction then, and sends nothing.
    """
    connection = guard.connection
    if not guard.transaction:
        return True  # the savepoint existed
    if not is_outermost(connection) or connection.closed_in_transaction:
        return False
    try:
        return is_usable(connection) and not execute_script(connection, "ROLLBACK; ", _HAS_COMMITTED, [guard.transaction])
    except (DatabaseError, InterfaceError):
        return False


def dead_letter_if_committed(guard: Guard) -> bool:
    """done | received | retrying → dead for the rows of a transaction that the handler has committed by itself.

    In its own commit, after the handler's transaction was rolled back. False: the rollback removed its rows, or their locks.
    """
    connection = guard.connection
    if connection.in_atomic_block or (guard.transaction and not fetch(connection, _HAS_COMMITTED, [guard.transaction])):
        return False
    claimed = guard.claimed
    if claimed is None:
        days = ", ".join(map(str, {LIVE, *receipts.days_of(connection.alias, guard.rows).values()}))
        was, ours, given = State.DONE, f"day IN ({days}) AND state = 'done'", []
    else:
        # If the fence differs, the answer that was lost is that of `fail_run`.
        was, ours, given = State(claimed.state), f"{IS_OPEN} AND state = %s AND fence = %s", [claimed.state, claimed.fence]
    sql = (
        f"UPDATE {TABLE} SET {assignments(ABANDON_AS, connection.vendor)} WHERE {ours} "
        f"AND id IN ({', '.join(['%s'] * len(guard.rows))}) RETURNING id"
    )
    as_json = "%s::jsonb" if is_postgresql(connection) else "%s"
    with transaction.atomic(using=connection.alias):
        dead_lettered = [row for (row,) in fetch(connection, sql, [*given, *guard.rows])]
        refill = f"UPDATE {TABLE} SET body = %s, headers = {as_json} WHERE {IS_OPEN} AND id = %s"
        for row, content in zip(guard.rows, guard.emptied, strict=False):
            execute(connection, refill, [content.body, content.headers, row])  # a retry needs its content
        record(connection.alias, dead_lettered, was=was, reason=ABANDONED)
        report(connection.alias, dead_lettered)
    return bool(dead_lettered)


def refuse_if_ended(guard: Guard) -> None:
    """On SQLite, check that the handler is still inside the transaction that began.

    If the transaction was ended without Django, SQLite's driver remains in autocommit, and every later statement would commit
    by itself. Releasing the inbox's savepoint then fails. On PostgreSQL another transaction begins; the sentinel detects it by
    its id, and the caller rolls it back.

    Raises:
        TransactionEnded: it is not.
    """
    connection = guard.connection
    if guard.transaction or connection.closed_in_transaction or is_postgresql(connection):
        return
    try:
        # Through the driver: Django refuses statements in a transaction that it has marked for rollback.
        connection.connection.execute(_RELEASE)
    except sqlite3.OperationalError as error:
        if "no such savepoint" in str(error):
            raise TransactionEnded(ENDED) from error
        raise
