"""The commit sentinel: the last statement of a handler's transaction proves that it is still the one that began.

Django and PostgreSQL roll back without an exception if a handler has swallowed a database error. A consumer that acknowledged
then would lose the message.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, InterfaceError, connections, transaction

from inbox.conf import inbox_options
from inbox.errors import TransactionBroken, TransactionEnded
from inbox.models import State
from inbox.store.dialect import TABLE
from inbox.store.failures import ABANDONED_AS, ABANDONED_NOW
from inbox.store.ordering import GATE, for_gate, promote_next
from inbox.store.rows import ABANDONED, PARTLY, Guard
from inbox.store.trail import record
from outbox.database.connections import is_postgresql
from outbox.database.faults import UNDEFINED_TABLE, is_collision, is_outage, sqlstate_of
from outbox.database.now import now
from outbox.database.prepared_statements import PreparedStatement, is_usable
from outbox.kernel.text import describe

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

ENDED = f"The handler ended the inbox's transaction: it committed or rolled back behind Django's back. {PARTLY}"
SAVEPOINT = "inbox_guard"
_WRITTEN = (
    "state = 'done', attempts = {attempts}, settled_at = {now}, last_error = '', traceback = '', "
    "error_class = '', error_place = '', failing_since = NULL"
)
_EMPTIED = {"postgresql": ", body = '', headers = '{}'", "sqlite": ", body = x'', headers = '{}'"}
"""Also written, if the bodies of done messages are not stored. The digest stays: conflicting duplicates are still found."""
# Without CASE, the planner would use a partial index and read the dead entries of all rows handled since the last vacuum.
_OURS = "CASE WHEN state = 'received' AND next_attempt_at IS NULL THEN TRUE ELSE FALSE END"
_INSERTED_BY_US = "xmin = pg_current_xact_id()::xid"
_READ = PreparedStatement("inbox_read", ["bigint"], f"SELECT 1 FROM {TABLE} WHERE id = $1 AND {_INSERTED_BY_US}")
_FINISHED = f"WHERE id = $1 AND {_OURS} AND pg_current_xact_id()::text = $3"


def _set_done(*, keep_body: bool) -> str:
    written = _WRITTEN.format(attempts="$2", now="statement_timestamp()")
    return f"UPDATE {TABLE} SET {written}{'' if keep_body else _EMPTIED['postgresql']}"


_FINISH = {
    keep_body: PreparedStatement(
        "inbox_finish" if keep_body else "inbox_finish_emptied",
        ["bigint", "int", "text"],
        f"{_set_done(keep_body=keep_body)} {_FINISHED}",
    )
    for keep_body in (True, False)
}
_FINISH_IN_ORDER = {
    keep_body: PreparedStatement(
        "inbox_finish_in_order" if keep_body else "inbox_finish_in_order_emptied",
        ["bigint", "int", "text", "bigint", "text"],
        f"{_set_done(keep_body=keep_body)} {_FINISHED} RETURNING {GATE.format(gate='$4', bound='$5')}",
    )
    for keep_body in (True, False)
}


def finish(guard: Guard, attempts: int, result: str | None = None) -> None:
    """received → done, as the last statement of the handler's transaction: the commit sentinel. It must hit every row.

    Rows that were inserted as `done` are read instead: PostgreSQL stores in `xmin` which transaction has inserted a row, and in
    a transaction that can no longer commit it refuses to read.

    If a row has a place in an order, the next one is promoted and is then its follower; that is not part of the proof.

    Args:
        result: the handler's result as JSON, if it may be asked for again.

    Raises:
        TransactionBroken: this transaction cannot commit.
        TransactionEnded: this is not the transaction that began.
    """
    connection = connections[guard.alias]
    if connection.closed_in_transaction:
        raise TransactionBroken(
            "The handler returned, but its transaction can no longer commit: it closed the database connection, which rolled "
            "everything back. Leave connections to Django; close_old_connections() is for threads of your own."
        )
    refuse_if_ended(guard)
    try:
        hit = _finish(connection, guard, attempts, result)
    except (DatabaseError, InterfaceError) as error:
        if is_outage(error) or is_collision(error):
            raise
        if sqlstate_of(error) == UNDEFINED_TABLE:
            cause = "It has changed search_path, so that the inbox's table is not found. Change it back before returning."
        else:
            cause = (
                "It caught a database error without a savepoint. Let the error out, or wrap the statement that may fail in its "
                "own `with transaction.atomic():`."
            )
        raise TransactionBroken(
            f"The handler returned, but its transaction can no longer commit ({describe(error)}). {cause}"
        ) from error
    if hit != len(guard.rows):
        raise TransactionEnded(ENDED)
    record(guard.alias, guard.rows, was=guard.was, matters=False)
    if guard.order is not None:
        follower = guard.follower
        row = promote_next(guard.alias, *guard.order, claimed_for=follower.claimed_for if follower else None)
        if follower:
            follower.row = row


def _finish(connection: BaseDatabaseWrapper, guard: Guard, attempts: int, result: str | None) -> int:
    """How many rows were hit."""
    if guard.is_settled and result is None:
        return _count_ours(connection, guard)
    keep_body = inbox_options().keeps_all_bodies
    if result is None and len(guard.rows) == 1 and is_usable(connection):
        connection.validate_no_broken_transaction()
        given = [guard.rows[0], attempts, guard.transaction]
        if guard.order is None:
            return _FINISH[keep_body].execute(connection, given).hit
        return _FINISH_IN_ORDER[keep_body].execute(connection, [*given, *for_gate(connection, guard.order)]).hit
    also = "" if keep_body else _EMPTIED[connection.vendor]
    if result is not None:
        also += ", result = %s"
    sql = (
        f"UPDATE {TABLE} SET {_WRITTEN.format(attempts='%s', now=now(connection))}{also} "
        f"WHERE id IN ({', '.join(['%s'] * len(guard.rows))}) AND {_INSERTED_BY_US if guard.is_settled else _OURS}"
    )
    parameters: list[Any] = [attempts, *([] if result is None else [result]), *guard.rows]
    if is_postgresql(connection):
        sql += " AND pg_current_xact_id()::text = %s"
        parameters.append(guard.transaction)
        if guard.order is not None:
            sql += f" RETURNING {GATE.format(gate='%s', bound='%s')}"
            parameters += for_gate(connection, guard.order)
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return int(cursor.rowcount)


def _count_ours(connection: BaseDatabaseWrapper, guard: Guard) -> int:
    """How many rows this transaction has inserted."""
    connection.validate_no_broken_transaction()
    if len(guard.rows) == 1 and is_usable(connection):
        return len(_READ.execute(connection, guard.rows).rows)
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM {TABLE} WHERE id = ANY(%s) AND {_INSERTED_BY_US}", [list(guard.rows)])
        return int(cursor.fetchone()[0])


def dead_letter_if_committed(guard: Guard) -> bool:
    """done → dead for rows that were inserted as `done` by a transaction that the handler has committed, and then failed.

    In its own commit, after the handler's transaction was rolled back. False: the rollback removed the rows.
    """
    connection = connections[guard.alias]
    if not guard.is_settled or connection.in_atomic_block:
        return False
    committed = f"FROM {TABLE} WHERE id = ANY(%s) AND state = 'done' AND xmin = %s::xid8::xid"
    given: list[Any] = [list(guard.rows), guard.transaction]
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT 1 {committed} LIMIT 1", given)
        if cursor.fetchone() is None:
            return False
    with transaction.atomic(using=guard.alias), connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {TABLE} SET state = 'dead', {ABANDONED_NOW.format(now=now(connection))} "
            f"WHERE id IN (SELECT id {committed}) RETURNING id",
            [*ABANDONED_AS, *given],
        )
        dead_lettered = [row for (row,) in cursor.fetchall()]
        for row, said in zip(guard.rows, guard.emptied, strict=False):
            # An operator who retries it needs its content.
            cursor.execute(
                f"UPDATE {TABLE} SET body = %s, headers = %s::jsonb WHERE id = %s AND state = 'dead'",
                [said.body, said.headers, row],
            )
        record(guard.alias, dead_lettered, was=State.DONE, reason=ABANDONED)
    return bool(dead_lettered)


def refuse_if_ended(guard: Guard) -> None:
    """SQLite: is the handler still inside the transaction that began?

    Its driver stays in autocommit if the transaction was ended behind Django's back, so every later statement would commit
    by itself. Releasing our savepoint fails then. PostgreSQL begins another transaction, which our caller rolls back and the
    sentinel detects by its id.

    Raises:
        TransactionEnded: no.
    """
    connection = connections[guard.alias]
    if is_postgresql(connection) or connection.closed_in_transaction:
        return
    try:
        # Through the driver: Django refuses statements in a transaction that it has marked for rollback.
        connection.connection.execute(f"RELEASE SAVEPOINT {SAVEPOINT}")
    except sqlite3.OperationalError as error:
        if "no such savepoint" in str(error):
            raise TransactionEnded(ENDED) from error
        raise
