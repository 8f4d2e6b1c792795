"""Stored messages: claimed in their own commit, run, failed, given back.

`next_attempt_at` is NULL only inside the transaction that runs the row, so other transactions do not see it. A committed row
that is due and has no `next_attempt_at` can only come from a handler that committed by itself. It is not run again;
`dead_letter_abandoned` makes it a dead letter.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from django.db import IntegrityError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, Q

from exactly_once.sql.connections import fetch, is_postgresql
from exactly_once.sql.days import LIVE
from exactly_once.sql.now import NOW_AFTER, DatabaseTime, now_after
from exactly_once.sql.prepared_statements import KEEP_PLANS, PreparedStatement, is_usable
from inbox.models import InboxMessage, Receipt
from inbox.states import DUE, SKIP_COPY, State
from inbox.store import due, receipts
from inbox.store.dialect import (
    BOUND,
    IS_OPEN,
    LONGEST_LOCK_WAIT,
    TABLE,
    UNBOUND,
    as_bound,
    assignments,
    columns_of,
    locked_means_busy,
    message_of,
    run,
)
from inbox.store.duplicates import count_duplicate
from inbox.store.failure_columns import ABANDON_AS, as_written, fail
from inbox.store.message_rows import (
    ABANDONED,
    COLUMNS,
    Earlier,
    Failure,
    Guard,
    KeyBusy,
    NewRow,
    OrderedKey,
    Successor,
    order_of,
    stored_row,
)
from inbox.store.ordering import deciding, promote_after_commit, promote_behind, run_lock, sees_every_commit
from inbox.store.sentinel import SAVEPOINT
from inbox.store.trail_entries import record, update

# In a CASE, or the planner may prefer reading the whole index of due rows to the primary key.
_IS_CLAIMED = f"{IS_OPEN} AND CASE WHEN {due.STORED} THEN next_attempt_at IS NOT NULL ELSE false END"
_OURS = f"id = %s AND fence = %s AND {_IS_CLAIMED}"
_COLUMNS = columns_of("m")
_SET_BEGUN = f"UPDATE {TABLE} SET state = 'received', next_attempt_at = NULL"


def _claim(name: str, also: str = "") -> PreparedStatement:
    # Materialised, because a re-evaluated sub-select with LIMIT may take more rows than one.
    return PreparedStatement(
        name,
        ["json", "float8"],
        f"WITH due AS MATERIALIZED ({due.first_due('postgresql', also).replace('%s', '$1')}) "
        f"{due.CLAIM.format(after=NOW_AFTER['postgresql'] % '$2')} FROM due WHERE m.id = due.id AND m.{IS_OPEN} "
        f"RETURNING {_COLUMNS}",
    )


_CLAIM = _claim("inbox_claim")
_CLAIM_UNQUARANTINED = _claim("inbox_claim_unquarantined", due.NOT_QUARANTINED)
# One round trip: bound the wait for the row, lock it, restore the transaction's own lock_timeout, found or not.
_BEGIN = PreparedStatement(
    "inbox_begin_stored",
    ["text", "bigint", "bigint", "bigint"],
    f"{BOUND.replace('%s', '$1')}, begun AS ({_SET_BEGUN} FROM bound "
    f"WHERE id = $2 AND fence = $3 AND {_IS_CLAIMED} RETURNING pg_current_xact_id()::text AS proof, ordered, "
    f"current_setting('transaction_isolation'), pg_try_advisory_xact_lock($4)) "
    f"SELECT begun.*, {UNBOUND} FROM bound LEFT JOIN begun ON true",
)


def claim_due(
    alias: str,
    handlers: Sequence[str],
    redelivery_after: timedelta,
    *,
    quarantined: bool = True,
) -> InboxMessage | None:
    """Claim one due message of the first of these handlers that has any, and count the attempt, in its own commit.

    If the process dies, the message is due again after `redelivery_after`, with the attempt counted, so that a message
    which kills its process runs out of attempts. The claim does not wait: a row that another transaction is running is
    locked, and skipped. The row gets a new fence, so earlier claims and leases of it can settle nothing.

    Args:
        handlers: the caller changes their order from call to call, so that the backlog of one does not delay the others.
        quarantined: also claim messages whose last attempt began and never ended.
    """
    connection = connections[alias]
    if not handlers:
        return None
    wanted, lasts = json.dumps([*handlers]), redelivery_after.total_seconds()
    if is_postgresql(connection):
        statement = _CLAIM if quarantined else _CLAIM_UNQUARANTINED
        if is_usable(connection) and not connection.in_atomic_block:
            rows = statement.fetch_after(connection, f"SELECT {KEEP_PLANS}", [wanted, str(lasts)])
        else:
            rows = fetch(connection, *statement.as_text([wanted, lasts]))
        claimed = next((message_of(alias, row) for row in rows), None)
    # An UPDATE of no row would still take the write lock.
    elif not due.due_handlers(alias, handlers):
        return None
    else:
        found = due.first_due("sqlite", "" if quarantined else due.NOT_QUARANTINED)
        sql = f"{due.CLAIM.format(after=NOW_AFTER['sqlite'])} WHERE id = ({found}) RETURNING *"
        claimed = next(iter(InboxMessage.objects.using(alias).raw(sql, [lasts, wanted])), None)
    if claimed is not None and claimed.stopping:
        # It exempts this attempt from the crash quarantine, and not the next.
        under_claim(alias, claimed).update(stopping=False)
    return claimed


def claim_task(alias: str, row: NewRow, redelivery_after: timedelta) -> InboxMessage | None:
    """received | retrying, its attempt counted, in its own commit: the open row of this delivery of a Celery task.

    Celery delivers and retries tasks, so an open row is run by the delivery that finds it. Such a row exists while a
    redelivered message is running, and after a worker died while running it. A task that fails normally leaves none: Celery
    decides what comes next.

    None: another transaction is handling it, or there is nothing to run.
    """
    connection, given = connections[alias], [redelivery_after.total_seconds(), *receipts.name_of(row)]
    skip_locked = "FOR UPDATE SKIP LOCKED" if is_postgresql(connection) else ""
    sql = (
        f"{due.CLAIM.format(after=now_after(connection))} WHERE {IS_OPEN} AND id = (SELECT id FROM {TABLE} "
        f"WHERE id = {receipts.ID_OF} AND {IS_OPEN} AND state IN ('received', 'retrying') AND next_attempt_at IS NOT NULL "
        f"{skip_locked}) RETURNING *"
    )
    return next(iter(InboxMessage.objects.using(alias).raw(sql, given)), None)


def delete_task(alias: str, claimed: InboxMessage) -> bool:
    """received → ∅, after the task failed normally. False: it is no longer ours."""
    return bool(receipts.delete(alias, f"{_OURS} AND state = 'received'", [claimed.pk, claimed.fence]))


def under_claim(alias: str, claimed: InboxMessage) -> Any:
    """A query for the claimed row, which finds nothing once another claim or run has begun, or an operator has decided."""
    return InboxMessage.objects.using(alias).filter(
        pk=claimed.pk, day=LIVE, fence=claimed.fence, state__in=DUE, next_attempt_at__isnull=False
    )


def begin_stored(
    alias: str,
    claimed: InboxMessage,
    exclusive_key: OrderedKey | None = None,
    successor: Successor | None = None,
    *,
    longest_wait: timedelta = LONGEST_LOCK_WAIT,
) -> Guard | None:
    """Lock a claimed row as the first statement of the handler's transaction. None: it is no longer ours.

    Args:
        exclusive_key: no other message of this key may run at the same time.
        successor: gets the next message in its order.

    Raises:
        KeyBusy: another one is running. Roll back, and give the row back.
        ConcurrentDuplicate: another session has locked the row and did not release it within `longest_wait`.
    """
    connection = connections[alias]
    if successor is not None:
        successor.message = None
    found = _begin(connection, claimed, exclusive_key, longest_wait)
    if found is None:
        return None
    proof, ordered, isolation, has_run_lock = found
    if not has_run_lock:
        raise KeyBusy
    order = exclusive_key if ordered else None
    if not sees_every_commit(isolation):
        if order is not None:
            promote_after_commit(alias, order)
        order = successor = None
    return Guard(connection, (claimed.pk,), proof, order, successor, claimed.state, begun=(0,))


def _begin(
    connection: BaseDatabaseWrapper, claimed: InboxMessage, exclusive_key: OrderedKey | None, longest_wait: timedelta
) -> tuple[str, bool, str, bool] | None:
    """The transaction's id, has the row a place in an order, the isolation level, and was the run lock acquired?"""
    if is_postgresql(connection):
        # A lock that is not wanted is NULL, and so is the answer.
        lock = None if exclusive_key is None else run_lock(exclusive_key)
        with locked_means_busy:
            ((proof, *found, _),) = run(_BEGIN, connection, [as_bound(longest_wait), claimed.pk, claimed.fence, lock])
        ordered, isolation, has_run_lock = found
        return None if proof is None else (proof, ordered, isolation, has_run_lock is not False)
    with connection.cursor() as cursor:
        cursor.execute(f"{_SET_BEGUN} WHERE {_OURS} RETURNING ordered", [claimed.pk, claimed.fence])
        on_sqlite = cursor.fetchall()
        if not on_sqlite:
            return None
        cursor.execute(f"SAVEPOINT {SAVEPOINT}")
    return "", bool(on_sqlite[0][0]), "", True


def identify(alias: str, claimed: InboxMessage, row: NewRow) -> bool | None:
    """Make a claimed row that was stored without its biz-id that of its message `row`.

    False: another row has the biz-id. None: it is no longer ours.

    Raises:
        ConcurrentDuplicate: another transaction is inserting a row of that biz-id and did not end in time.
    """
    columns = {name: getattr(row, name) for name in COLUMNS} | {"headers": json.loads(row.headers)}
    try:
        with deciding(alias, LONGEST_LOCK_WAIT), locked_means_busy:
            if not under_claim(alias, claimed).update(**columns):
                return None
            copied = {column: value for column, value in columns.items() if column in receipts.COPIED}
            Receipt.objects.using(alias).filter(pk=claimed.pk).update(**copied)
    except IntegrityError:
        return False
    for column, value in columns.items():
        setattr(claimed, column, value)
    return True


def make_parked_due(alias: str, row: NewRow) -> None:
    """received, parked and due later → due now, because the run of its message has ended."""
    receipts.open_message(alias, row).filter(state=State.RECEIVED, attempts=0).update(next_attempt_at=DatabaseTime())


def identify_parked(alias: str, claimed: InboxMessage, row: NewRow, longest_wait: timedelta) -> bool | None:
    """Make the row of a parked delivery that of its message `row`. False: that has another row. None: the claim has ended.

    A copy that was stored later in the same order is counted on it, so that the message keeps its first place.

    Raises:
        ConcurrentDuplicate: a transaction that is inserting that row did not end within `longest_wait`.
    """
    with deciding(alias, longest_wait), locked_means_busy:
        later = _later_copy(alias, claimed, row)
        if later is not None:
            receipts.delete(alias, f"id = %s AND {IS_OPEN}", [later.pk])
        named = identify(alias, claimed, row)
        if not named:
            transaction.set_rollback(True, using=alias)
        elif later is not None:
            count_duplicate(alias, replace(stored_row(later), copies=later.duplicates))
    return named


def _later_copy(alias: str, claimed: InboxMessage, row: NewRow) -> InboxMessage | None:
    if not claimed.ordered:
        return None
    behind = receipts.open_message(alias, row).filter(state=State.WAITING, ordered=True, key=claimed.key)
    return behind.exclude(pk=claimed.pk).first()


def count_parked(alias: str, claimed: InboxMessage, row: NewRow, longest_wait: timedelta) -> Earlier | None:
    """received → ∅: its message `row` has another row, on which it is counted with its copies.

    None: a transaction is running that row now, or the claim has ended; try again later.

    Raises:
        ConcurrentDuplicate: a lock was held for longer than `longest_wait`.
    """
    with deciding(alias, longest_wait), locked_means_busy:
        given = [claimed.pk, claimed.fence]
        copies = receipts.delete(alias, f"id = %s AND {IS_OPEN} AND fence = %s", given, returning="duplicates")
        earlier = count_duplicate(alias, replace(row, copies=copies[0])) if copies else None
        if earlier is None:
            transaction.set_rollback(True, using=alias)
        else:
            promote_behind(alias, order_of(claimed))
    return earlier


def fail_stored(alias: str, claimed: InboxMessage, failure: Failure, *, leaves: OrderedKey | None = None) -> bool:
    """received | retrying → retrying | dead, after the handler's transaction was rolled back. False: it is no longer ours.

    A dead letter keeps its place in the order of its key, unless it `leaves` that order, which promotes the next one.

    Raises:
        ConcurrentDuplicate: another session has locked the row and does not release it.
    """
    with locked_means_busy:
        return fail(
            alias, under_claim(alias, claimed), failure, was=claimed.state, leaves=leaves, longest_wait=LONGEST_LOCK_WAIT
        )


def skip_duplicate(alias: str, claimed: InboxMessage, reason: str) -> None:
    """received | retrying | running → skipped, for a claimed row whose message has another row, unless it is no longer ours."""
    with deciding(alias):
        written = {**SKIP_COPY.columns, "last_error": f"skipped: {reason}"}
        ours = update(alias, under_claim(alias, claimed), written, was=claimed.state, reason=reason)
        promote_behind(alias, order_of(claimed) if ours else None)


def record_error(alias: str, claimed: InboxMessage, failure: Failure) -> None:
    """Store the error of an attempt that outlasted its claim, unless a later attempt has failed or an operator has decided."""
    # A claim increments both; an operator's decision only the fence.
    only_claimed = F("attempts") + (claimed.fence - claimed.attempts)
    # Not equal, because SQLite's own instants have fewer digits than those that Django gives it.
    not_since = Q(failed_at=None) if claimed.failed_at is None else Q(failed_at__lte=claimed.failed_at)
    row = InboxMessage.objects.using(alias).filter(not_since, pk=claimed.pk, day=LIVE, fence=only_claimed, state__in=DUE)
    row.update(**as_written(failure))


def give_back(alias: str, claimed: InboxMessage, after: timedelta = timedelta()) -> None:
    """Refund a claimed attempt that could not be made; the message is due again `after` a backoff."""
    under_claim(alias, claimed).update(**refunded(claimed), next_attempt_at=DatabaseTime(after))


def refunded(claimed: InboxMessage) -> dict[str, Any]:
    """What undoes the claim of an attempt that was not made."""
    return {"attempts": claimed.attempts - 1, **({"stopping": True} if claimed.stopping else {})}


def age(alias: str, row: int) -> timedelta:
    """How long ago a message arrived, by the database's clock; zero if it no longer has a row."""
    instants = InboxMessage.objects.using(alias).filter(pk=row, day=LIVE).values_list("received_at", DatabaseTime())
    return max((asked_at - received_at for received_at, asked_at in instants), default=timedelta())


def dead_letter_abandoned(alias: str, row: int | None = None) -> list[InboxMessage]:
    """received, committed by its handler itself → dead. Without `row`, all such rows. What names each message is returned."""
    # Read first, because an UPDATE of no row would still take SQLite's write lock.
    rows = due.abandoned(alias) if row is None else [row]
    if not rows:
        return []
    condition = f"{due.ABANDONED} AND id IN ({', '.join(['%s'] * len(rows))})"
    connection = connections[alias]
    written, lock = assignments(ABANDON_AS, connection.vendor), "FOR UPDATE" if is_postgresql(connection) else ""
    with transaction.atomic(using=alias):
        was = dict(fetch(connection, f"SELECT id, state FROM {TABLE} WHERE {condition} {lock}", rows))
        names = ["id", "handler", "topic", "message_id", "biz_id"]
        sql = f"UPDATE {TABLE} SET {written} WHERE {condition} RETURNING {', '.join(names)}"
        found = [InboxMessage(**dict(zip(names, message, strict=True))) for message in fetch(connection, sql, rows)]
        for message in found:
            record(alias, [message.pk], was=was[message.pk], reason=ABANDONED)
    return found
