"""Messages that wait in the database: claimed in their own commit, run, failed, given back.

Other transactions do not see that a row is being run: only inside its own transaction `next_attempt_at` is NULL. So a
committed due row without `next_attempt_at` can only come from a handler that committed by itself. It is never run again;
`dead_letter_abandoned` makes it a dead letter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, IntegrityError, connections, transaction

from inbox.models import DUE, InboxMessage, State
from inbox.store import due
from inbox.store.dialect import BOUND, LONGEST_LOCK_WAIT, TABLE, UNBOUND, as_bound
from inbox.store.failures import ABANDONED_AS, ABANDONED_NOW, as_written
from inbox.store.ordering import begun, deciding, hold_gates, passes_on, promote_next
from inbox.store.rows import ABANDONED, Failure, Follower, Guard, KeyBusy, OrderedKey, locked_means_busy
from inbox.store.sentinel import SAVEPOINT
from inbox.store.trail import is_recorded, record_leaving
from outbox.database.connections import is_postgresql, lock_timeout
from outbox.database.now import DatabaseTime, now, now_after

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_OURS = f"id = %s AND attempts = %s AND CASE WHEN {due.STORED} THEN next_attempt_at IS NOT NULL ELSE false END"


def claim_due(
    alias: str,
    handlers: Sequence[str],
    redelivery_after: timedelta,
    *,
    quarantined: bool = True,
    without: Collection[int] = (),
) -> InboxMessage | None:
    """Claim one due message of the first of these handlers that has any, and count the attempt, in its own commit.

    If the process dies, the message is due again after `redelivery_after`, with the attempt counted, so that a message
    which kills its process runs out of attempts. The claim does not wait: a row that another transaction is running is
    locked and skipped, whatever its `next_attempt_at`. A running row whose lease has ended is taken from its owner: it
    gets another fence.

    Args:
        handlers: the caller changes their order from call to call, so that the backlog of one does not stop the others.
        quarantined: also those whose last attempt began and never ended.
        without: rows to skip.
    """
    connection = connections[alias]
    if not handlers:
        return None
    found, wanted = due.first_due(connection, handlers, quarantined=quarantined, without=without)
    written = _claiming(connection)
    lasts = redelivery_after.total_seconds()
    if is_postgresql(connection):
        # Materialised, because a re-evaluated sub-select with LIMIT may take more rows than one.
        sql = f"WITH due AS MATERIALIZED ({found}) UPDATE {TABLE} m SET {written} FROM due WHERE m.id = due.id RETURNING m.*"
        parameters: list[Any] = [*wanted, lasts]
    else:
        # An UPDATE of no row would still take the write lock.
        if not due.due_handlers(alias, handlers):
            return None
        sql = f"UPDATE {TABLE} SET {written} WHERE id = ({found}) RETURNING *"
        parameters = [lasts, *wanted]
    claimed: list[InboxMessage] = list(InboxMessage.objects.using(alias).raw(sql, parameters))
    return claimed[0] if claimed else None


def refused_claim(
    alias: str, handlers: Sequence[str], *, quarantined: bool = True, without: Collection[int] = ()
) -> int | None:
    """The row that `claim_due` fails on, because the database refuses to change it; None if it does not fail.

    Nothing is claimed.
    """
    connection = connections[alias]
    found, wanted = due.first_due(connection, handlers, quarantined=quarantined, without=without)
    with transaction.atomic(using=alias):
        with connection.cursor() as cursor:
            cursor.execute(found, wanted)
            row = cursor.fetchone()
        if row is None:
            return None
        try:
            with transaction.atomic(using=alias), connection.cursor() as cursor:
                if is_postgresql(connection):
                    cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
                cursor.execute(f"UPDATE {TABLE} SET {_claiming(connection)} WHERE id = %s", [0.0, *row])
                transaction.set_rollback(True, using=alias)
        except DatabaseError:
            return int(row[0])
    return None


def _claiming(connection: BaseDatabaseWrapper) -> str:
    return (
        "attempts = attempts + 1, fence = fence + CASE WHEN state = 'running' THEN 1 ELSE 0 END, "
        f"next_attempt_at = {now_after(connection)}"
    )


def claimed(alias: str, row: int) -> InboxMessage:
    """The message that has been claimed as a follower."""
    found: InboxMessage = InboxMessage.objects.using(alias).raw(f"SELECT * FROM {TABLE} WHERE id = %s", [row])[0]
    return found


def begin_stored(
    alias: str,
    row: int,
    attempts: int,
    alone_in: OrderedKey | None = None,
    follower: Follower | None = None,
    *,
    was: str = State.RECEIVED,
    longest_wait: timedelta = LONGEST_LOCK_WAIT,
) -> Guard | None:
    """Lock a claimed row as the first statement of the handler's transaction. None: it is no longer ours.

    Args:
        alone_in: no other message of this key may run at the same time.
        follower: identifies the next message in its order.
        was: the state that it was claimed in, for the trail.

    Raises:
        KeyBusy: one does. Roll back, and give the row back.
        ConcurrentDuplicate: another session has locked the row and did not release it within `longest_wait`.
    """
    connection = connections[alias]
    postgresql = is_postgresql(connection)
    if follower is not None:
        follower.row = None
    returned = "pg_current_xact_id()::text AS proof" if postgresql else "''"
    parameters: list[Any] = [row, attempts]
    if alone_in is not None:
        columns, for_columns = begun(connection, alone_in)
        returned += f", ordered, {columns}"
        parameters += for_columns
    sql = (
        # In a CASE, or the planner may prefer reading the whole index of due rows to the primary key.
        f"WHERE id = %s AND attempts = %s AND CASE WHEN {due.STORED} THEN next_attempt_at IS NOT NULL ELSE false END "
        f"RETURNING {returned}"
    )
    begin = f"UPDATE {TABLE} SET state = 'received', next_attempt_at = NULL"
    if postgresql:
        # One round trip: bound the wait for the row, lock it, restore the transaction's own lock_timeout, found or not.
        sql = f"{BOUND}, begun AS ({begin} FROM bound {sql}) SELECT begun.*, {UNBOUND} FROM bound LEFT JOIN begun ON true"
        parameters.insert(0, as_bound(longest_wait))
    else:
        sql = f"{begin} {sql}"
    with locked_means_busy(), connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        found = [columns for columns in cursor.fetchall() if columns[0] is not None]
        if not found:
            return None
        if not postgresql:
            cursor.execute(f"SAVEPOINT {SAVEPOINT}")
    if alone_in is None:
        return Guard(alias, (row,), found[0][0], was=was)
    proof, ordered, isolation, alone = found[0][:4]
    if not alone:
        raise KeyBusy
    return Guard(alias, (row,), proof, passes_on(alias, alone_in, isolation) if ordered else None, follower, was)


def rekey(alias: str, row: int, biz_id: str) -> bool:
    """Give a row that was stored without a biz-id the one known now. False: another row has it."""
    try:
        with transaction.atomic(using=alias):
            InboxMessage.objects.using(alias).filter(pk=row).update(biz_id=biz_id)
    except IntegrityError:
        return False
    return True


def fail_stored(alias: str, row: int, attempts: int, failure: Failure, *, leaves: OrderedKey | None = None) -> bool:
    """received | retrying → retrying | dead, after the handler's transaction was rolled back. False: no longer ours.

    A dead letter keeps its place in the order of its key, unless it `leaves` that order, which promotes the next one.

    Raises:
        ConcurrentDuplicate: another session has locked the row and does not release it.
    """
    dead = failure.retry_after is None
    became = State.DEAD if dead else State.RETRYING
    written = {
        "state": became,
        "attempts": failure.attempts,
        **as_written(failure),
        "next_attempt_at": None if failure.retry_after is None else DatabaseTime(failure.retry_after),
        "settled_at": DatabaseTime() if dead else None,
        "quarantined": failure.quarantined,
    }
    ours = InboxMessage.objects.using(alias).filter(pk=row, attempts=attempts, state__in=DUE, next_attempt_at__isnull=False)
    matters = not failure.put_off

    def ours_is_told() -> bool:
        told = record_leaving(alias, _OURS, [row, attempts], became=became, reason=failure.error, matters=matters)
        return bool(told) or not is_recorded(matters=matters)

    if not dead or leaves is None:
        with transaction.atomic(using=alias), locked_means_busy(), lock_timeout(alias, LONGEST_LOCK_WAIT):
            return ours_is_told() and bool(ours.update(**written))
    with locked_means_busy(), deciding(alias):
        if not ours_is_told() or not ours.update(**written, ordered=False):
            return False
        hold_gates(alias, leaves.handler, [leaves.key])
        promote_next(alias, *leaves)
        return True


def record_error(alias: str, row: int, failure: Failure) -> None:
    """Store the error of an attempt that outlasted its claim, so that another attempt has begun."""
    InboxMessage.objects.using(alias).filter(pk=row, state__in=DUE).update(**as_written(failure))


def give_back(alias: str, row: int, attempts: int, after: timedelta = timedelta()) -> None:
    """Refund a claimed attempt that could not be made; the message is due again `after` a backoff."""
    InboxMessage.objects.using(alias).filter(pk=row, attempts=attempts, state__in=DUE, next_attempt_at__isnull=False).update(
        attempts=attempts - 1, next_attempt_at=DatabaseTime(after)
    )


def age(alias: str, row: int) -> timedelta:
    """How long ago a message arrived, by the database's clock; zero if it no longer has a row."""
    instants = InboxMessage.objects.using(alias).filter(pk=row).values_list("received_at", DatabaseTime())
    return max((asked_at - received_at for received_at, asked_at in instants), default=timedelta())


def who_locks(alias: str, row: int) -> str:
    """Which session has locked the row, for people; "" if that is unknown."""
    connection = connections[alias]
    if not is_postgresql(connection):
        return ""
    with transaction.atomic(using=alias), connection.cursor() as cursor:
        cursor.execute("SET LOCAL lock_timeout = 100")  # all of the table may be locked
        cursor.execute(
            "SELECT format('process %%s (%%s, %%s for %%s s)', a.pid, coalesce(nullif(a.application_name, ''), a.usename), "
            "a.state, extract(epoch FROM clock_timestamp() - a.state_change)::int) "
            f"FROM {TABLE} m JOIN pg_locks l ON l.locktype = 'transactionid' AND l.transactionid = m.xmax AND l.granted "
            "JOIN pg_stat_activity a ON a.pid = l.pid WHERE m.id = %s",
            [row],
        )
        found = cursor.fetchone()
    return str(found[0]) if found and found[0] else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLettered:
    """A message that was made a dead letter."""

    handler: str
    message_id: str
    biz_id: str


def dead_letter_abandoned(alias: str, row: int | None = None) -> list[DeadLettered]:
    """received, committed by its handler itself → dead; which ones. Without `row`, all such rows."""
    # Reading first, because an UPDATE of no row would still take SQLite's write lock.
    rows = due.abandoned(alias) if row is None else [row]
    if not rows:
        return []
    condition = f"{due.ABANDONED} AND id IN ({', '.join(['%s'] * len(rows))})"
    connection = connections[alias]
    with transaction.atomic(using=alias), connection.cursor() as cursor:
        record_leaving(alias, condition, rows, became=State.DEAD, reason=ABANDONED)
        cursor.execute(
            f"UPDATE {TABLE} SET state = 'dead', {ABANDONED_NOW.format(now=now(connection))} WHERE {condition} "
            "RETURNING handler, message_id, biz_id",
            [*ABANDONED_AS, *rows],
        )
        return [
            DeadLettered(handler=handler, message_id=message, biz_id=biz_id) for handler, message, biz_id in cursor.fetchall()
        ]
