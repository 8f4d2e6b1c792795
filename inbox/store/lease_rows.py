"""The right to run one message outside any transaction, stored in the message's own row.

A `running` row belongs to the owner of its latest *fence*, until `next_attempt_at`. Every statement here that acts for an owner
names its fence, and is refused once the lease has ended by the database's clock or another owner has taken it. `renew` is
granted after the end, if the fence proves that the message was not taken over.

The results of a message's named steps are stored beside it, so that a retry does not take them again. A result of SQL's NULL
means that the step was begun and its outcome is unknown. JSON's null is an ordinary result.
"""

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any, NamedTuple

from django.db import DatabaseError, InterfaceError, connections, transaction

from exactly_once.sql.connections import fetch, is_postgresql
from exactly_once.sql.days import LIVE
from exactly_once.sql.deletions import delete_matching
from exactly_once.sql.now import DatabaseTime, now, now_after
from exactly_once.sql.prepared_statements import PreparedStatement, is_usable, run_together
from inbox.conf import inbox_options
from inbox.models import InboxMessage, Step
from inbox.states import FINISH, LEASE, State
from inbox.store import receipts
from inbox.store.arrivals import insert_one, insertion_of
from inbox.store.claims import under_claim
from inbox.store.dialect import IS_OPEN, LONGEST_LOCK_WAIT, SHORTEST_LOCK_WAIT, TABLE, locked_means_busy
from inbox.store.failure_columns import fail
from inbox.store.message_rows import Failure, KeyBusy, NewRow, OrderedKey
from inbox.store.ordering import deciding, hold_gates, promote_behind
from inbox.store.sentinel import written
from inbox.store.trail_entries import record, update

STEPS = Step._meta.db_table
_WRITE = "ON CONFLICT (message_id, name) DO UPDATE SET result = excluded.result, taken_at = excluded.taken_at"
_LEASE_OVER = "its lease had ended: its process died, or the run took longer than the lease"
# Without CASE the planner would use a partial index, and read the dead entries of leases that have ended since the last vacuum.
_OWNED = f"{IS_OPEN} AND CASE WHEN state = 'running' AND next_attempt_at > statement_timestamp() THEN TRUE ELSE FALSE END"
_CONSUME = PreparedStatement(
    "inbox_consume",
    ["bigint", "bigint", "boolean"],
    f"UPDATE {TABLE} SET {written('postgresql', keep='$3')} WHERE id = $1 AND fence = $2 AND {_OWNED}",
)


class Granted(NamedTuple):
    """A lease on a row: the row, the attempt and the fencing token."""

    row: int
    attempt: int
    fence: int


def lease_fresh(alias: str, row: NewRow, lease: timedelta, duplicate_timeout: timedelta) -> Granted | None:
    """∅ → running, its first attempt counted. None: the row exists.

    Raises:
        ConcurrentDuplicate: see `begin_fresh`.
    """
    pk = insert_one(alias, row, State.RUNNING, duplicate_timeout, due_after=lease.total_seconds(), attempts=1, fence=1)
    return None if pk is None else Granted(pk, 1, 1)


def lease_over(alias: str, row: NewRow, lease: timedelta, *, is_retry: bool = False) -> Granted | None:
    """running, past its lease → running, attempt and fence incremented. None: it is in another state, or has other content.

    For a delivery of a message whose process has died; a runner would also take it over, a little later.

    Args:
        is_retry: an answer of `lease_fresh` may have been lost. A lease that it granted for the same duration is granted again.
    """
    connection = connections[alias]
    seconds, ours = lease.total_seconds(), "false"
    if is_retry and is_postgresql(connection):
        ours = "(fence = 1 AND next_attempt_at = received_at + make_interval(secs => %s))"
    one, given = f"CASE WHEN {ours} THEN 0 ELSE 1 END", [seconds] * ours.count("%s")
    sql = (
        f"UPDATE {TABLE} SET attempts = attempts + {one}, fence = fence + {one}, stopping = false, "
        f"next_attempt_at = {now_after(connection)} WHERE id = {receipts.ID_OF} AND {IS_OPEN} AND digest = %s "
        f"AND state = 'running' AND (next_attempt_at <= {now(connection)} OR {ours}) RETURNING id, attempts, fence"
    )
    with transaction.atomic(using=alias):
        found = fetch(connection, sql, [*given, *given, seconds, *receipts.name_of(row), row.digest, *given])
        granted = Granted(*found[0]) if found else None
        if granted and granted.fence > 1:  # fence 1 is a lease that was granted before
            record(alias, [granted.row], was=State.RUNNING, reason=_LEASE_OVER)
    return granted


def lease_stored(
    alias: str, claimed: InboxMessage, lease: timedelta, exclusive_key: OrderedKey | None = None, *, fence: int | None = None
) -> Granted | None:
    """received | retrying | running, claimed → running, under the fence of the claim. None: the claim has ended.

    Args:
        exclusive_key: no other message of this key may run at the same time.
        fence: that of an external lease, which is the claim's or greater.

    Raises:
        KeyBusy: another one is running. Give the row back.
        ConcurrentDuplicate: another session has locked the row and does not release it.
    """
    token = fence or claimed.fence
    with locked_means_busy, deciding(alias, LONGEST_LOCK_WAIT):
        written = {**LEASE.columns, "fence": token, "next_attempt_at": DatabaseTime(lease)}
        over = claimed.state == State.RUNNING
        reason = _LEASE_OVER if over else ""
        ours = update(alias, under_claim(alias, claimed), written, was=claimed.state, reason=reason, matters=over)
        _refuse_concurrent_run(alias, claimed.pk, exclusive_key)
    return Granted(claimed.pk, claimed.attempts, token) if ours else None


def extend(alias: str, pk: int, fence: int, lease: timedelta, stopping: bool = False) -> bool:
    """running → running, until `lease` from now. False: the lease has ended.

    Args:
        stopping: its process has been asked to stop.
    """
    return bool(_owned(alias, pk, fence).update(next_attempt_at=DatabaseTime(lease), stopping=stopping))


def renew(
    alias: str, pk: int, fence: int, lease: timedelta, stopping: bool = False, exclusive_key: OrderedKey | None = None
) -> bool:
    """running, past its lease → running, until `lease` from now. False: another claim or a decision has changed the fence.

    Also False if another message of the `exclusive_key` has a lease.

    Args:
        stopping: as of `extend`.
    """
    with suppress(KeyBusy), deciding(alias, LONGEST_LOCK_WAIT):
        _refuse_concurrent_run(alias, pk, exclusive_key)
        ours = InboxMessage.objects.using(alias).filter(pk=pk, day=LIVE, fence=fence, state=State.RUNNING)
        return bool(ours.update(next_attempt_at=DatabaseTime(lease), stopping=stopping))
    return False


def consume(alias: str, pk: int, fence: int, order: OrderedKey | None = None) -> bool:
    """running → done, and promote the next one of its `order`. False: the lease has ended."""
    connection = connections[alias]
    if order is None and not (FINISH.recorded or inbox_options().records_all) and is_usable(connection):
        done = _CONSUME.execute(connection, [pk, fence, inbox_options().keeps_successes]).hit
        return bool(done) or _is_in_state(alias, pk, fence, State.DONE)
    with deciding(alias) if order else nullcontext():
        done = update(alias, _owned(alias, pk, fence), done_columns(), was=State.RUNNING, matters=FINISH.recorded)
        promote_behind(alias, order)
    # After a connection lost during the commit, this is called again.
    return bool(done) or _is_in_state(alias, pk, fence, State.DONE)


def consume_and_lease(alias: str, pk: int, fence: int, row: NewRow, lease: timedelta) -> tuple[bool, Granted | None]:
    """`consume` and `lease_fresh`, for the next message, in one commit. If that cannot be made, only the first."""
    connection = connections[alias]
    if not (connection.in_atomic_block or FINISH.recorded or inbox_options().records_all) and is_usable(connection):
        done = _CONSUME, [pk, fence, inbox_options().keeps_successes]
        lasts = lease.total_seconds()
        leased = insertion_of(row, State.RUNNING, SHORTEST_LOCK_WAIT, due_after=lasts, attempts=1, fence=1)
        # The next one has its own errors by itself.
        with suppress(DatabaseError, InterfaceError):
            consumed, inserted = run_together(connection, [done, leased])
            new = inserted.rows[0][0]
            is_done = bool(consumed.hit) or _is_in_state(alias, pk, fence, State.DONE)
            return is_done, None if new is None else Granted(int(new), 1, 1)
    return consume(alias, pk, fence), None


def free(alias: str, pk: int, fence: int, failure: Failure, leaves: OrderedKey | None = None) -> bool:
    """running → retrying | dead, which ends the lease. False: the lease has ended.

    A dead letter keeps its place in the order of its key, unless it `leaves` that order, which promotes the next one.
    """
    freed = fail(alias, _owned(alias, pk, fence), failure, was=State.RUNNING, leaves=leaves)
    return freed or _is_in_state(alias, pk, fence, State.RETRYING, State.DEAD)


def _owned(alias: str, pk: int, fence: int) -> Any:
    return InboxMessage.objects.using(alias).filter(
        pk=pk, day=LIVE, fence=fence, state=State.RUNNING, next_attempt_at__gt=DatabaseTime()
    )


def _is_in_state(alias: str, pk: int, fence: int, *states: State) -> bool:
    found: bool = receipts.message(alias, pk).filter(fence=fence, state__in=states).exists()
    return found


def done_columns() -> dict[str, Any]:
    return {
        **FINISH.columns,
        **({} if inbox_options().keeps_successes else {"body": b"", "headers": {}}),
    }


def _refuse_concurrent_run(alias: str, pk: int, exclusive_key: OrderedKey | None) -> None:
    """Raise KeyBusy if another message of the key is running. Under the gate one of two concurrent runs sees the other."""
    if exclusive_key is None:
        return
    hold_gates(alias, exclusive_key.handler, [exclusive_key.key])
    others = InboxMessage.objects.using(alias).filter(
        handler=exclusive_key.handler, key=exclusive_key.key, day=LIVE, state=State.RUNNING, next_attempt_at__gt=DatabaseTime()
    )
    if others.exclude(pk=pk).exists():
        raise KeyBusy


def steps_of(alias: str, row: int) -> dict[str, str | None]:
    """The results of its steps as JSON, by name; None for one that was begun."""
    # As text, because decoding jsonb would turn both null and NULL into None.
    as_text = "result::text" if is_postgresql(connections[alias]) else "result"
    return dict(fetch(connections[alias], f"SELECT name, {as_text} FROM {STEPS} WHERE message_id = %s", [row]))


def remember(alias: str, row: int, fence: int, step: str, result: str | None) -> bool:
    """Store the result of a step, or with None that it has begun. False: the lease has ended."""
    connection = connections[alias]
    as_json = "%s::jsonb" if is_postgresql(connection) else "%s"
    # The lock prevents that another owner takes the lease between reading and inserting and does not see the step.
    lock = "FOR UPDATE" if is_postgresql(connection) else ""
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {STEPS} (message_id, name, result, taken_at) "
            f"SELECT id, %s, {as_json}, {now(connection)} FROM {TABLE} "
            f"WHERE id = %s AND fence = %s AND {IS_OPEN} AND state = 'running' AND next_attempt_at > {now(connection)} "
            f"{lock} {_WRITE}",
            [step, result, row, fence],
        )
        return bool(cursor.rowcount == 1)


def remember_all(alias: str, row: int, steps: Mapping[str, str | None]) -> None:
    """Store the known steps of a message that failed under an external lease."""
    connection = connections[alias]
    as_json = "%s::jsonb" if is_postgresql(connection) else "%s"
    with connection.cursor() as cursor:
        for step, result in steps.items():
            cursor.execute(
                f"INSERT INTO {STEPS} (message_id, name, result, taken_at) "
                f"VALUES (%s, %s, {as_json}, {now(connection)}) {_WRITE}",
                [row, step, result],
            )


def forget_begun(alias: str, row: int, fence: int, step: str) -> None:
    """Delete a step that was begun and has not ended, unless the message has a later fence."""
    steps = Step.objects.using(alias).filter(message_id=row, message__day=LIVE, message__fence=fence)
    delete_matching(steps.filter(name=step, result__isnull=True))
