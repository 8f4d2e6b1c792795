"""The first delivery of a message, and its duplicates."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from django.db import connections

from exactly_once.sql.connections import is_outermost, is_postgresql
from exactly_once.sql.now import now
from exactly_once.sql.prepared_statements import is_usable
from inbox.conf import inbox_options
from inbox.models import DUE, State
from inbox.store.dialect import TABLE, binary, fetch_all
from inbox.store.failures import as_inserted
from inbox.store.inserting import Insertion, insert_done, insert_one
from inbox.store.rows import DuplicateCause, Earlier, Failure, Guard, NewRow, attributes_of, conflicting_name, emptied
from inbox.store.sentinel import SAVEPOINT
from inbox.store.trail import record, recording

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
    "conflicting_at = CASE WHEN digest <> %s THEN {now} ELSE conflicting_at END, "
    "conflicting_attributes = CASE WHEN digest <> %s THEN {json} ELSE conflicting_attributes END"
)

_NAMED = f"COALESCE((SELECT biz_id FROM {TABLE} WHERE handler = %s AND topic = %s AND biz_id = %s), %s)"
"""The biz-id of the row with this content of its own, else that of the first message."""


def begin_fresh(
    alias: str, row: NewRow, duplicate_timeout: timedelta, *, attempt: int = 1, result: str | None = None
) -> Guard | None:
    """∅ → done, as the first statement of the handler's transaction. None: the row exists, this is a duplicate.

    No other transaction sees the row before the commit, and then its state is true; so it is written once. Where the sentinel
    cannot read which transaction inserted it (in a savepoint, on SQLite, behind a proxy), it is ∅ → received first.

    Args:
        result: the handler's expected result as JSON, so that a handler with this result need not write the row again.

    Raises:
        ConcurrentDuplicate: another transaction is inserting the same row and did not end within `duplicate_timeout`.
    """
    connection = connections[alias]
    # In a caller's transaction, a duplicate must not leave this statement's lock_timeout set.
    if is_outermost(connection) and is_usable(connection):
        return _begin_prepared(connection, row, duplicate_timeout, attempt, result)
    inserted = insert_one(alias, Insertion(row=row, state=State.RECEIVED), duplicate_timeout)
    if inserted is not None and not is_postgresql(connection):
        with connection.cursor() as cursor:
            cursor.execute(f"SAVEPOINT {SAVEPOINT}")
    return inserted


def _begin_prepared(
    connection: BaseDatabaseWrapper, row: NewRow, duplicate_timeout: timedelta, attempt: int, result: str | None
) -> Guard | None:
    # No other transaction sees the row unless it is done.
    stored = row if inbox_options().keeps_all_bodies else emptied(row)
    inserted = insert_done(connection, stored, duplicate_timeout, attempts=attempt, result=result)
    if inserted is None:
        return None
    pk, begun = inserted
    return Guard(connection.alias, (pk,), begun, is_settled=True, emptied=() if stored is row else (row,), result=result)


def store_due(alias: str, row: NewRow, duplicate_timeout: timedelta, *, after: timedelta = timedelta()) -> bool:
    """∅ → received, due now or `after` a delay, for the runner. False: the row exists.

    Raises:
        ConcurrentDuplicate: see `begin_fresh`.
    """
    with recording(alias, matters=False):
        insertion = Insertion(row=row, state=State.RECEIVED, due_after=after.total_seconds())
        inserted = insert_one(alias, insertion, duplicate_timeout)
        record(alias, inserted.rows if inserted else (), was="", matters=False)
    return inserted is not None


def store_failed(alias: str, row: NewRow, failure: Failure, duplicate_timeout: timedelta) -> bool:
    """∅ → retrying | dead, after the handler's transaction was rolled back. False: the row exists.

    Raises:
        ConcurrentDuplicate: see `begin_fresh`.
    """
    insertion = Insertion(
        row=row,
        state=State.DEAD if failure.retry_after is None else State.RETRYING,
        due_after=None if failure.retry_after is None else failure.retry_after.total_seconds(),
        attempts=failure.attempts,
        quarantined=failure.quarantined,
        **as_inserted(failure),
    )
    matters = not failure.deferred
    with recording(alias, matters=matters):
        inserted = insert_one(alias, insertion, duplicate_timeout)
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
    insertion = Insertion(
        row=row,
        state=State.RUNNING,
        due_after=ends_after.total_seconds(),
        attempts=attempts,
        fence=fence,
        duplicates=int(duplicate is not None),
        redeliveries=int(duplicate is DuplicateCause.REDELIVERY),
        resends=int(duplicate is DuplicateCause.RESEND),
        replays=int(duplicate is DuplicateCause.REPLAY),
        conflicts=int(conflicting),
        conflicting_attributes=attributes_of(row) if conflicting else None,
    )
    with recording(alias, matters=False):
        inserted = insert_one(alias, insertion, duplicate_timeout)
        record(alias, inserted.rows if inserted else (), was="", matters=False)
    return inserted.rows[0] if inserted else None


def count_duplicate(alias: str, row: NewRow, *, redelivered: bool = False) -> Earlier | None:
    """Count a duplicate of a stored row by its cause. If its content differs, store that content.

    Content that an operator has run as its own message is a duplicate of that message's row.

    Args:
        redelivered: the broker says that it has delivered this message before.

    None: a transaction is running that row now, or it was deleted meanwhile; try again later.
    """
    connection = connections[alias]
    skip_locked = "FOR UPDATE SKIP LOCKED" if is_postgresql(connection) else ""
    as_json = "%s::jsonb" if is_postgresql(connection) else "%s"
    if_the_same = cause_if_the_same(row, redelivered=redelivered)
    column = _COUNTED_AS[if_the_same]
    # A message without an id is known to be the same only if the broker says so.
    same_id = row.message_id if row.message_id or redelivered else None
    found = fetch_all(
        connection,
        f"UPDATE {TABLE} SET duplicates = duplicates + 1, "
        f"{column} = {column} + CASE WHEN message_id = %s THEN 1 ELSE 0 END, "
        f"{_KEEP_CONFLICT.format(now=now(connection), body=binary(connection), json=as_json)} "
        f"WHERE id = (SELECT id FROM {TABLE} WHERE handler = %s AND topic = %s AND biz_id = {_NAMED} {skip_locked}) "
        # Plain columns: SQLite 3.40 evaluates `... IS NULL` in RETURNING wrongly.
        "RETURNING id, state, message_id, digest, next_attempt_at",
        [
            *(same_id, row.digest, row.digest, row.message_id, row.digest, row.body, row.digest),
            *(row.digest, attributes_of(row), row.handler, row.topic),
            *(row.handler, row.topic, conflicting_name(row.digest, row.biz_id), row.biz_id),
        ],
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
