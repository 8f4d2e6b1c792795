"""Stored messages: claimed in their own commit, run, failed, given back.

The transaction that runs a message locks its row first, and then sets a savepoint. After a failure it rolls back to that,
stores the failure and commits. So the row is not free between its run and the outcome, even if the claim has ended meanwhile.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from django.db import DatabaseError, IntegrityError, InterfaceError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F

from exactly_once.process.logs import escaping_logger
from exactly_once.sql.connections import LONGEST_IDLE, execute, fetch, is_outermost, is_postgresql, set_local
from exactly_once.sql.days import LIVE
from exactly_once.sql.now import NOW, NOW_AFTER, DatabaseTime, now, now_after
from exactly_once.sql.prepared_statements import KEEP_PLANS, Prepared, PreparedStatement, Rows, is_usable
from inbox import deaths
from inbox.models import InboxMessage
from inbox.states import DUE, State
from inbox.store import due, receipts
from inbox.store.dialect import (
    BOUND,
    IS_OPEN,
    LONGEST_LOCK_WAIT,
    RECEIPTS,
    TABLE,
    UNBOUND,
    adapted,
    as_bound,
    columns_of,
    locked_means_busy,
    message_of,
    run,
)
from inbox.store.duplicates import count_duplicate
from inbox.store.failure_columns import as_failed, fail
from inbox.store.message_rows import (
    COLUMNS,
    Earlier,
    Failure,
    Guard,
    KeyBusy,
    NewRow,
    OrderedKey,
    order_of,
    stored_row,
)
from inbox.store.ordering import FOLLOWING, RUN_LOCK, deciding, promote_after_commit, promote_behind, sees_every_commit
from inbox.store.sentinel import ROLL_BACK_RUN, SET_SAVEPOINT, roll_back_run
from inbox.store.trail_entries import update

logger = escaping_logger(__name__)

# In a CASE, or the planner may prefer reading the whole index of due rows to the primary key.
_IS_DUE = f"{IS_OPEN} AND CASE WHEN {due.STORED} THEN true ELSE false END"
_OURS = f"id = %s AND fence = %s AND {_IS_DUE}"
_COLUMNS = columns_of("m")
_NEXT_FENCE = F("fence") + 1
_IS_LOCKED = {
    # Without a lock of its own, which could hold up a claim.
    "postgresql": "EXISTS (SELECT FROM pg_locks WHERE locktype = 'transactionid' AND transactionid = m.xmax)",
    "sqlite": "false",
}
"""Has an open transaction locked the row, by `connection.vendor`?"""


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
# One round trip: bound the wait for the row, lock it, restore the transaction's own lock_timeout, found or not. Without an id,
# it is that of the row that the transaction before this one has claimed.
_BEGIN = PreparedStatement(
    "inbox_begin_stored",
    ["bigint", "bigint", "text", "boolean"],
    f"{BOUND.replace('%s', '$3')}, begun AS MATERIALIZED (SELECT ordered, handler, key FROM bound, {TABLE} AS m "
    f"WHERE id = COALESCE($1, ({FOLLOWING})[1]) AND fence = COALESCE($2, ({FOLLOWING})[2]) AND {_IS_DUE} FOR UPDATE OF m) "
    "SELECT pg_current_xact_id()::text, ordered::text, current_setting('transaction_isolation'), "
    f"(CASE WHEN key <> '' AND (ordered OR $4) THEN {RUN_LOCK} END)::text, {UNBOUND} FROM bound LEFT JOIN begun ON true",
)
# It takes the write lock. The fence differs from that of the claim if the handler commits this by itself.
_BEGIN_ON_SQLITE = f"UPDATE {TABLE} SET fence = fence + 1 WHERE {_OURS} RETURNING ordered"


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
        f"WHERE id = {receipts.ID_OF} AND {IS_OPEN} AND state IN ('received', 'retrying') {skip_locked}) RETURNING *"
    )
    return next(iter(InboxMessage.objects.using(alias).raw(sql, given)), None)


def delete_task(alias: str, claimed: InboxMessage) -> bool:
    """received → ∅, after the task failed normally. False: it is no longer ours."""
    return bool(receipts.delete(alias, f"{_OURS} AND state = 'received'", [claimed.pk, claimed.fence]))


def under_claim(alias: str, claimed: InboxMessage) -> Any:
    """A query for the claimed row, which finds nothing once another claim or run has begun, or an operator has decided."""
    return InboxMessage.objects.using(alias).filter(pk=claimed.pk, day=LIVE, fence=claimed.fence, state__in=DUE)


def begin_stored(
    alias: str,
    claimed: InboxMessage,
    *,
    is_ordered: bool = False,
    longest_wait: timedelta = LONGEST_LOCK_WAIT,
    limits: Sequence[bytes] = (),
) -> Guard | None:
    """Lock a claimed row as the first statement of the handler's transaction. None: it is no longer ours.

    Args:
        is_ordered: its handler is. Then, or if its row has a place in an order, no other message of its key may run.
        limits: statements that bound the transaction of the handler.

    Raises:
        KeyBusy: another one is running. Roll back, and give the row back.
        ConcurrentDuplicate: another session has locked the row and did not release it within `longest_wait`.
    """
    connection = connections[alias]
    if not is_postgresql(connection):
        locked = fetch(connection, _BEGIN_ON_SQLITE, [claimed.pk, claimed.fence])
        if not locked:
            return None
        execute(connection, SET_SAVEPOINT.decode())
        order = order_of(claimed) if locked[0][0] else None
        claimed = copy(claimed)
        claimed.fence += 1
        return Guard(connection, (claimed.pk,), "", (0,), claimed, order)
    then = [SET_SAVEPOINT, *limits[: 2 if is_outermost(connection) else 1]]
    given = [claimed.pk, claimed.fence, as_bound(longest_wait), is_ordered]
    return begun(connection, claimed, partial(run, _BEGIN, connection, given, then=then))


def first_statement(longest_wait: timedelta, limits: Sequence[bytes], *, is_ordered: bool) -> Prepared:
    """What `begin_stored` executes, in a transaction of its own, for the row that the one before has claimed."""
    return _BEGIN, [None, None, as_bound(longest_wait), is_ordered], [SET_SAVEPOINT, *limits]


def begun(connection: BaseDatabaseWrapper, claimed: InboxMessage, answer: Callable[[], Rows]) -> Guard | None:
    """What `begin_stored` returns and raises, by the answer to the `first_statement`."""
    with locked_means_busy:
        ((proof, ordered, isolation, has_run_lock, _),) = answer()
    if ordered is None:
        return None
    if has_run_lock == "false":
        raise KeyBusy
    order, claims = order_of(claimed) if ordered == "true" else None, sees_every_commit(isolation)
    if order is not None and not claims:
        promote_after_commit(connection.alias, order)
        order = None
    return Guard(connection, (claimed.pk,), proof, (0,), claimed, order, claims)


def identify(alias: str, claimed: InboxMessage, row: NewRow, longest_wait: timedelta) -> bool | None:
    """Make the row of a parked delivery that of its message `row`. False: that has another row. None: the claim has ended.

    A copy that was stored later in the same order is counted on it, so that the message keeps its first place.

    Raises:
        ConcurrentDuplicate: a transaction that is inserting that row did not end within `longest_wait`.
    """
    connection, stored = connections[alias], stored_row(claimed)
    changed = [name for name in COLUMNS if getattr(stored, name) != getattr(row, name)]
    given = [*(adapted(connection, getattr(row, name)) for name in changed), claimed.pk, claimed.fence]
    message = f"UPDATE {TABLE} SET {', '.join(f'{name} = %s' for name in changed)}"
    copied = ", ".join(f"{name} = message.{name}" for name in changed if name in receipts.COPIED)
    receipt = f"UPDATE {RECEIPTS} SET {copied} FROM {{}} WHERE {RECEIPTS}.id = message.id"
    is_alone = is_postgresql(connection) and not connection.in_atomic_block and not claimed.ordered
    try:
        with nullcontext() if is_alone else deciding(alias, longest_wait), locked_means_busy:
            later = _later_copy(alias, claimed, row) if claimed.ordered else None
            if later is not None:
                receipts.delete(alias, f"id = %s AND {IS_OPEN}", [later.pk])
            if is_postgresql(connection):
                sql = (
                    f"{BOUND}, message AS ({message} FROM bound WHERE {_OURS} RETURNING {TABLE}.*), "
                    f"receipt AS ({receipt.format('message')} RETURNING 1) SELECT count(receipt), {UNBOUND} "
                    "FROM bound LEFT JOIN receipt ON true GROUP BY bound.before"
                )
                ours = fetch(connection, sql, [as_bound(longest_wait), *given])[0][0]
            elif ours := execute(connection, f"{message} WHERE {_OURS}", given):
                execute(connection, f"{receipt.format(f'{TABLE} AS message')} AND message.id = %s", [claimed.pk])
            if later is not None and ours:
                count_duplicate(alias, replace(stored_row(later), copies=later.duplicates))
            elif later is not None:
                transaction.set_rollback(True, using=alias)
    except IntegrityError:
        return False
    if not ours:
        return None
    for name in changed:
        setattr(claimed, name, json.loads(row.headers) if name == "headers" else getattr(row, name))
    return True


def make_parked_due(alias: str, row: NewRow) -> None:
    """received, parked and due later → due now, because the run of its message has ended."""
    receipts.open_message(alias, row).filter(state=State.RECEIVED, attempts=0).update(next_attempt_at=DatabaseTime())


def _later_copy(alias: str, claimed: InboxMessage, row: NewRow) -> InboxMessage | None:
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
    rows, longest_wait = under_claim(alias, claimed), LONGEST_LOCK_WAIT
    with locked_means_busy:
        ours = fail(alias, rows, failure, was=claimed.state, leaves=leaves, longest_wait=longest_wait, fence=_NEXT_FENCE)
    return ours or _is_stored(alias, claimed, failure)


def _is_stored(alias: str, claimed: InboxMessage, failure: Failure) -> bool:
    """Was it stored before, so that the answer to the commit was lost? A later claim has counted another attempt."""
    state = State.DEAD if failure.retry_after is None else State.RETRYING
    rows = InboxMessage.objects.using(alias).filter(pk=claimed.pk, day=LIVE, fence=claimed.fence + 1)
    found: bool = rows.filter(state=state, attempts=failure.attempts).exists()
    return found


def fail_run(guard: Guard, failure: Failure, *, leaves: OrderedKey | None = None) -> bool:
    """received | retrying → retrying | dead, in the transaction that ran the message, which commits nothing else.

    False: that transaction is open no more, or is part of another one; roll back, and call `fail_stored`.
    """
    connection, claimed = guard.connection, guard.claimed
    is_ours = claimed is not None and is_outermost(connection) and not connection.closed_in_transaction
    if claimed is None or not is_ours or (leaves is not None and guard.order is None):
        return False
    alias, columns = connection.alias, {**as_failed(failure, leaves_order=leaves is not None), "fence": _NEXT_FENCE}
    rows, matters = under_claim(alias, claimed), not failure.deferred
    write = partial(update, alias, rows, columns, was=claimed.state, reason=failure.error, matters=matters)
    try:
        is_reported = deaths.reported and failure.retry_after is None
        if leaves is None and not is_reported and is_usable(connection):
            write(script=f"{ROLL_BACK_RUN}; ", commit=True)
            return True
        roll_back_run(guard)
        write()
        if is_postgresql(connection):
            # If this process is frozen, the key's other messages must not wait for it.
            execute(connection, set_local(lock_timeout=LONGEST_LOCK_WAIT, idle_in_transaction_session_timeout=LONGEST_IDLE))
        promote_behind(alias, leaves)
        with connection.wrap_database_errors:
            connection.connection.commit()  # Django's commit() is refused inside of atomic()
    except (DatabaseError, InterfaceError) as error:
        logger.debug("%s: message %s failed, which its run could not store: %s", claimed.handler, claimed.message_id, error)
        return False
    return True


def give_back(alias: str, claimed: InboxMessage, after: timedelta = timedelta()) -> None:
    """Refund a claimed attempt that could not be made; the message is due again `after` a backoff."""
    under_claim(alias, claimed).update(**refunded(claimed), next_attempt_at=DatabaseTime(after))


def give_back_of(alias: str, transaction_id: str, handler: str, claimed_for: timedelta) -> None:
    """Refund what this transaction has claimed for a handler: the answer to its commit was lost, so no process runs it."""
    now, latest = NOW["postgresql"], NOW_AFTER["postgresql"]
    sql = (
        f"UPDATE {TABLE} SET attempts = attempts - 1, next_attempt_at = {now} WHERE handler = %s AND {due.STORED} "
        f"AND next_attempt_at > {now} AND next_attempt_at <= {latest} AND attempts > 0 AND xmin = %s::xid8::xid"
    )
    # One that had begun is locked until the server knows that its session is lost.
    with locked_means_busy, deciding(alias, LONGEST_LOCK_WAIT):
        execute(connections[alias], sql, [handler, claimed_for.total_seconds(), transaction_id])


def refunded(claimed: InboxMessage) -> dict[str, Any]:
    """What undoes the claim of an attempt that was not made."""
    return {"attempts": claimed.attempts - 1, **({"stopping": True} if claimed.stopping else {})}


def is_held(alias: str, message: InboxMessage) -> bool:
    """Does a process hold a claim or a lease of this message, or has it locked the row to run it?

    A claim shows in the attempt that it has counted, whose outcome is not stored. A run may be longer than its claim.
    """
    if message.state not in DUE or not message.attempts:
        return False
    has_claim = message.state != State.RETRYING or message.attempts != (message.failures or [{"attempt": 0}])[-1]["attempt"]
    connection = connections[alias]
    held = f"%s AND next_attempt_at > {now(connection)} OR {_IS_LOCKED[connection.vendor]}"
    return bool(fetch(connection, f"SELECT 1 FROM {TABLE} m WHERE id = %s AND {IS_OPEN} AND ({held})", [message.pk, has_claim]))


def age(alias: str, row: int) -> timedelta:
    """How long ago a message arrived, by the database's clock; zero if it no longer has a row."""
    instants = InboxMessage.objects.using(alias).filter(pk=row, day=LIVE).values_list("received_at", DatabaseTime())
    return max((asked_at - received_at for received_at, asked_at in instants), default=timedelta())
