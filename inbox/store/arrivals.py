"""The first delivery of a message, and its duplicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import connections

from inbox.conf import inbox_options
from inbox.models import DUE, State
from inbox.store.dialect import BOUND, TABLE, UNBOUND, adapted, as_bound, binary, fetch_all
from inbox.store.failures import FAILED_NOW, as_inserted, failed_now
from inbox.store.rows import COLUMNS, DuplicateCause, Earlier, Failure, Guard, NewRow, emptied, locked_means_busy
from inbox.store.sentinel import SAVEPOINT
from inbox.store.trail import record, recording
from outbox.database.connections import is_outermost, is_postgresql
from outbox.database.now import now, now_after
from outbox.database.prepared_statements import PreparedStatement, is_usable
from outbox.kernel.clock import utcnow

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_COUNTED_AS = {
    DuplicateCause.REDELIVERY: "redeliveries",
    DuplicateCause.RESEND: "resends",
    DuplicateCause.REPLAY: "replays",
}
"""By cause, the column that counts it; no column counts `BUSINESS`."""
_KEEP_CONFLICT = (
    "conflicts = conflicts + CASE WHEN digest <> %s THEN 1 ELSE 0 END, "
    "conflicting_id = CASE WHEN digest <> %s THEN %s ELSE conflicting_id END, "
    "conflicting_body = CASE WHEN digest <> %s THEN {body} ELSE conflicting_body END, "
    "conflicting_at = CASE WHEN digest <> %s THEN {now} ELSE conflicting_at END"
)
_ONCE = "ON CONFLICT (handler, topic, biz_id) DO NOTHING"
_PLACES = [f"${number}" for number in range(1, len(COLUMNS) + 1)]
_ATTEMPT, _LONGEST_WAIT = (f"${len(COLUMNS) + number}" for number in (1, 2))
# One round trip: bound the wait for a concurrent duplicate, insert, restore the transaction's own lock_timeout.
_BEGIN = PreparedStatement(
    "inbox_begin",
    [*COLUMNS.values(), "int", "text"],
    f"{BOUND.replace('%s', _LONGEST_WAIT)} "
    f"INSERT INTO {TABLE} ({', '.join(COLUMNS)}, attempts, state, received_at, settled_at) "
    f"SELECT {', '.join(_PLACES)}, {_ATTEMPT}, 'done', statement_timestamp(), statement_timestamp() FROM bound {_ONCE} "
    "RETURNING id, pg_current_xact_id()::text, set_config('lock_timeout', (SELECT before FROM bound), true)",
)


def begin_fresh(alias: str, row: NewRow, duplicate_timeout: timedelta, *, attempt: int = 1) -> Guard | None:
    """∅ → done, as the first statement of the handler's transaction. None: the row exists, this is a duplicate.

    No other transaction sees the row before the commit, and then its state is true; so it is written once. Where the sentinel
    cannot read which transaction inserted it (in a savepoint, on SQLite, behind a proxy), it is ∅ → received first.

    Raises:
        ConcurrentDuplicate: another transaction is inserting the same row and did not end within `duplicate_timeout`.
    """
    connection = connections[alias]
    # In a caller's transaction, a duplicate must not leave this statement's lock_timeout set.
    if is_outermost(connection) and is_usable(connection):
        return _begin_prepared(connection, row, duplicate_timeout, attempt)
    inserted = insert(alias, row, duplicate_timeout, state=State.RECEIVED)
    if inserted is not None and not is_postgresql(connection):
        with connection.cursor() as cursor:
            cursor.execute(f"SAVEPOINT {SAVEPOINT}")
    return inserted


def _begin_prepared(connection: BaseDatabaseWrapper, row: NewRow, duplicate_timeout: timedelta, attempt: int) -> Guard | None:
    # No other transaction sees the row unless it is done.
    kept = row if inbox_options().keeps_all_bodies else emptied(row)
    given = [*(getattr(kept, column) for column in COLUMNS), attempt, as_bound(duplicate_timeout)]
    with locked_means_busy():
        rows = _BEGIN.execute(connection, given).rows
    if not rows:
        return None
    ((pk, begun, _),) = rows
    return Guard(connection.alias, (int(pk),), begun, is_settled=True, emptied=() if kept is row else (row,))


def store_due(alias: str, row: NewRow, duplicate_timeout: timedelta, *, after: timedelta = timedelta()) -> bool:
    """∅ → received, due now or `after` a delay, for the runner. False: the row exists.

    Raises:
        ConcurrentDuplicate: see `begin_fresh`.
    """
    with recording(alias, matters=False):
        inserted = insert(alias, row, duplicate_timeout, state=State.RECEIVED, due_after=after)
        record(alias, inserted.rows if inserted else (), was="", matters=False)
    return inserted is not None


def store_failed(alias: str, row: NewRow, failure: Failure, duplicate_timeout: timedelta) -> bool:
    """∅ → retrying | dead, after the handler's transaction was rolled back. False: the row exists.

    Raises:
        ConcurrentDuplicate: see `begin_fresh`.
    """
    state = State.DEAD if failure.retry_after is None else State.RETRYING
    matters = not failure.put_off
    with recording(alias, matters=matters):
        inserted = insert(alias, row, duplicate_timeout, state=state, failure=failure, due_after=failure.retry_after)
        record(alias, inserted.rows if inserted else (), was="", reason=failure.error, matters=matters)
    return inserted is not None


def store_running(
    alias: str,
    row: NewRow,
    duplicate_timeout: timedelta,
    *,
    ends_after: timedelta,
    attempts: int,
    fence: int,
    duplicate: DuplicateCause | None = None,
    conflicting: bool = False,
) -> int | None:
    """∅ → running, under a lease that ends after `ends_after`; the row. None: it exists.

    Args:
        duplicate: the row is that of a delivery that has none and is being run; this one is counted as its duplicate.
        conflicting: this one has other content.

    Raises:
        ConcurrentDuplicate: see `begin_fresh`.
    """
    also: dict[str, Any] = {"attempts": attempts, "fence": fence}
    if duplicate is not None:
        also |= {"duplicates": 1, **({_COUNTED_AS[duplicate]: 1} if duplicate in _COUNTED_AS else {})}
    if conflicting:
        at = adapted(connections[alias], utcnow())
        also |= {"conflicts": 1, "conflicting_id": row.message_id, "conflicting_body": row.body, "conflicting_at": at}
    with recording(alias, matters=False):
        inserted = insert(alias, row, duplicate_timeout, state=State.RUNNING, due_after=ends_after, also=also)
        record(alias, inserted.rows if inserted else (), was="", matters=False)
    return inserted.rows[0] if inserted else None


def insert(
    alias: str,
    row: NewRow,
    duplicate_timeout: timedelta,
    *,
    state: State,
    failure: Failure | None = None,
    due_after: timedelta | None = None,
    also: Mapping[str, Any] | None = None,
) -> Guard | None:
    """Insert a row in this state, unless it exists.

    Raises:
        ConcurrentDuplicate: see `begin_fresh`.
    """
    connection = connections[alias]
    at = now(connection)
    values: dict[str, Any] = {column: adapted(connection, getattr(row, column)) for column in COLUMNS} | {
        "state": state.value,
        **(as_inserted(failure) if failure else {}),
        "quarantined": failure is not None and failure.quarantined,
        **(also or {"attempts": failure.attempts if failure else 0}),
    }
    columns = ", ".join([*values, *FAILED_NOW, "received_at", "settled_at", "next_attempt_at"])
    parameters = [*values.values()]
    failed, recorded = failed_now(connection, failure)
    parameters += recorded
    due = "NULL"
    if due_after is not None:
        due = now_after(connection)
        parameters.append(due_after.total_seconds())
    each = (binary(connection) if column == "body" else "%s" for column in values)
    places = ", ".join([*each, *failed, at, at if state in {State.DEAD, State.SHED} else "NULL", due])
    if not is_postgresql(connection):
        sql = f"INSERT INTO {TABLE} ({columns}) VALUES ({places}) {_ONCE} RETURNING id, ''"
        return _guard(alias, fetch_all(connection, sql, parameters))
    # One round trip: bound the wait for a concurrent duplicate, insert, restore the transaction's own lock_timeout, also if
    # nothing was inserted. A row that exists is excluded before the unique index is checked, which would wait for the end of a
    # handler that is running the row.
    sql = (
        f"{BOUND}, begun AS (INSERT INTO {TABLE} ({columns}) SELECT {places} FROM bound "
        f"WHERE NOT EXISTS (SELECT 1 FROM {TABLE} WHERE handler = %s AND topic = %s AND biz_id = %s) {_ONCE} "
        "RETURNING id, pg_current_xact_id()::text) "
        f"SELECT begun.*, {UNBOUND} FROM bound LEFT JOIN begun ON true"
    )
    name = [row.handler, row.topic, row.biz_id]
    with locked_means_busy():
        return _guard(alias, fetch_all(connection, sql, [as_bound(duplicate_timeout), *parameters, *name]))


def _guard(alias: str, found: Sequence[tuple[Any, ...]]) -> Guard | None:
    return Guard(alias, (found[0][0],), found[0][1]) if found and found[0][0] else None


def count_duplicate(alias: str, row: NewRow, *, redelivered: bool = False) -> Earlier | None:
    """Count a duplicate of a stored row by its cause. If its content differs, store that content.

    Args:
        redelivered: the broker says that it has delivered this message before.

    None: a transaction is running that row now, or it was deleted meanwhile; try again later.
    """
    connection = connections[alias]
    skip_locked = "FOR UPDATE SKIP LOCKED" if is_postgresql(connection) else ""
    if_the_same = cause_if_the_same(row, redelivered=redelivered)
    column = _COUNTED_AS[if_the_same]
    # A message without an id is known to be the same only if the broker says so.
    same_id = row.message_id if row.message_id or redelivered else None
    found = fetch_all(
        connection,
        f"UPDATE {TABLE} SET duplicates = duplicates + 1, "
        f"{column} = {column} + CASE WHEN message_id = %s THEN 1 ELSE 0 END, "
        f"{_KEEP_CONFLICT.format(now=now(connection), body=binary(connection))} "
        f"WHERE id = (SELECT id FROM {TABLE} WHERE handler = %s AND topic = %s AND biz_id = %s {skip_locked}) "
        # Plain columns: SQLite 3.40 evaluates `... IS NULL` in RETURNING wrongly.
        "RETURNING id, state, message_id, digest, next_attempt_at",
        [same_id, *[row.digest] * 2, row.message_id, row.digest, row.body, row.digest, row.handler, row.topic, row.biz_id],
    )
    if not found:
        return None
    ((pk, state, message_id, digest, next_attempt_at),) = found
    return Earlier(
        pk,
        state,
        if_the_same if message_id == same_id else DuplicateCause.BUSINESS,
        conflicting=digest != row.digest,
        abandoned=state in DUE and next_attempt_at is None,
    )


def cause_if_the_same(row: NewRow, *, redelivered: bool) -> DuplicateCause:
    """The cause of a duplicate with the message id of the first."""
    if redelivered:
        return DuplicateCause.REDELIVERY
    return DuplicateCause.REPLAY if row.replayed else DuplicateCause.RESEND
