"""All SQL of the inbox. Every function is named for its transition and carries its guard.

The one statement everything rests on is the INSERT of `begin_fresh`: unique on (handler, topic, biz-id), first in the
handler's transaction. The other is the UPDATE of `finish`, the *commit sentinel*: last in the same transaction, it must hit
exactly the row that the transaction began with. Django and PostgreSQL roll back without an exception when a handler has
swallowed a database error; a consumer that acknowledged then would lose the message.

A row that is being run is invisible to others as such: inside its transaction `next_attempt_at` is NULL, outside it is not.
So a committed open row without `next_attempt_at` can only come from a handler that committed by itself. It is never run
again; `bury_abandoned` makes it visible.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, IntegrityError, InterfaceError, OperationalError, connections, transaction
from django.db.models import Count, Min, Sum

from inbox.errors import TransactionBroken, TransactionEnded
from inbox.models import DUE, SETTLED, InboxMessage, State
from outbox.kernel.clock import DatabaseTime, now_after
from outbox.kernel.databases import lock_timeout
from outbox.kernel.faults import LOCK_TIMEOUT, is_collision, is_outage
from outbox.kernel.text import ERROR_LENGTH, TRACEBACK_LENGTH, describe, printable

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

TABLE = InboxMessage._meta.db_table
_PARTLY = "Its effect may be there in part. Check by hand, then retry or skip."
ABANDONED = f"The handler committed by itself. {_PARTLY}"
ENDED = f"The handler ended the inbox's transaction: it committed or rolled back behind Django's back. {_PARTLY}"
_ONCE = "ON CONFLICT (handler, topic, biz_id) DO NOTHING"
_OPERATORS_WAIT = timedelta(seconds=10)
_SAVEPOINT = "inbox_guard"


class TwinBusy(Exception):
    """Another transaction has this very message in hand and did not end in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRow:
    """A delivery that can be stored: identified, every text fit for its column, `headers` serialised."""

    handler: str
    topic: str
    biz_id: str
    message_id: str
    key: str
    content_type: str
    body: bytes
    digest: str
    headers: str
    source: str
    correlation_id: str
    causation_id: str
    traceparent: str
    created_at: datetime | None


@dataclass(frozen=True, slots=True)
class Guard:
    """The row that the open transaction began with, and what proves that it is still the same transaction."""

    alias: str
    row: int
    transaction: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a message is not done.

    Attributes:
        retry_after: rest until the next attempt; None makes it a dead letter.
        attempts: how many have been made now.
        put_off: the handler asked for a later time; nothing went wrong.
    """

    error: str
    traceback: str = ""
    retry_after: timedelta | None
    attempts: int
    put_off: bool = False


# ------------------------------------------------------------------------------------------------------------ fresh delivery


def begin_fresh(alias: str, row: NewRow, twin_timeout: timedelta) -> Guard | None:
    """∅ → received, as the first statement of the handler's transaction. None: the row exists, this is a duplicate.

    Raises:
        TwinBusy: another transaction is inserting the same row and did not end within `twin_timeout`.
    """
    inserted = _insert(alias, row, twin_timeout, state=State.RECEIVED)
    if inserted is not None and connections[alias].vendor != "postgresql":
        with connections[alias].cursor() as cursor:
            cursor.execute(f"SAVEPOINT {_SAVEPOINT}")
    return inserted


def finish(guard: Guard, attempts: int) -> None:
    """received → done, as the last statement of the handler's transaction: the commit sentinel.

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
    sql = (
        f"UPDATE {TABLE} SET state = 'done', attempts = %s, settled_at = {_now(connection)}, last_error = '', traceback = '' "
        "WHERE id = %s AND state = 'received' AND next_attempt_at IS NULL"
    )
    parameters: list[Any] = [attempts, guard.row]
    if connection.vendor == "postgresql":
        sql += " AND pg_current_xact_id()::text = %s"
        parameters.append(guard.transaction)
    try:
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            hit = cursor.rowcount
    except (DatabaseError, InterfaceError) as error:
        if is_outage(error) or is_collision(error):
            raise
        raise TransactionBroken(
            f"The handler returned, but its transaction can no longer commit ({describe(error)}). It caught a database error "
            "without a savepoint. Let the error out, or wrap the statement that may fail in its own "
            "`with transaction.atomic():`."
        ) from error
    if hit != 1:
        raise TransactionEnded(ENDED)


def refuse_if_ended(guard: Guard) -> None:
    """SQLite: is the handler still inside the transaction that began?

    Its driver is left in autocommit when somebody ends the transaction behind Django's back, so every later statement would
    commit by itself. Releasing our savepoint fails then. PostgreSQL begins another transaction, which our caller rolls back
    and the sentinel tells by its id.

    Raises:
        TransactionEnded: no.
    """
    connection = connections[guard.alias]
    if connection.vendor == "postgresql" or connection.closed_in_transaction:
        return
    try:
        # Through the driver: Django refuses statements in a transaction that it has marked for rollback.
        connection.connection.execute(f"RELEASE SAVEPOINT {_SAVEPOINT}")
    except sqlite3.OperationalError as error:
        if "no such savepoint" in str(error):
            raise TransactionEnded(ENDED) from error
        raise


@dataclass(frozen=True, slots=True)
class Earlier:
    """The row that a duplicate met."""

    row: int
    state: str
    conflicting: bool
    abandoned: bool


def count_duplicate(alias: str, row: NewRow) -> Earlier | None:
    """Count a delivery of something stored before, and whether it says the same.

    None: a transaction is running that row right now, or it is gone meanwhile; ask again later.
    """
    connection = connections[alias]
    skip_locked = "FOR UPDATE SKIP LOCKED" if connection.vendor == "postgresql" else ""
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {TABLE} SET duplicates = duplicates + 1, conflicts = conflicts + CASE WHEN digest <> %s THEN 1 ELSE 0 END "
            f"WHERE id = (SELECT id FROM {TABLE} WHERE handler = %s AND topic = %s AND biz_id = %s {skip_locked}) "
            # The columns as they are: SQLite 3.40 answers `... IS NULL` in RETURNING wrongly.
            "RETURNING id, state, digest, next_attempt_at",
            [row.digest, row.handler, row.topic, row.biz_id],
        )
        found = cursor.fetchall()
    if not found:
        return None
    ((pk, state, digest, next_attempt_at),) = found
    return Earlier(pk, state, conflicting=digest != row.digest, abandoned=state in DUE and next_attempt_at is None)


def store_due(alias: str, row: NewRow, twin_timeout: timedelta) -> bool:
    """∅ → received, to be run now by whoever runs stored messages. False: the row exists.

    Raises:
        TwinBusy: see `begin_fresh`.
    """
    return _insert(alias, row, twin_timeout, state=State.RECEIVED, due_after=timedelta()) is not None


def store_failed(alias: str, row: NewRow, failure: Failure, twin_timeout: timedelta) -> bool:
    """∅ → retrying | dead, after the handler's transaction was rolled back. False: the row exists.

    Raises:
        TwinBusy: see `begin_fresh`.
    """
    state = State.DEAD if failure.retry_after is None else State.RETRYING
    return _insert(alias, row, twin_timeout, state=state, failure=failure, due_after=failure.retry_after) is not None


def _insert(
    alias: str,
    row: NewRow,
    twin_timeout: timedelta,
    *,
    state: State,
    failure: Failure | None = None,
    due_after: timedelta | None = None,
) -> Guard | None:
    connection = connections[alias]
    now = _now(connection)
    values: list[tuple[str, Any]] = [
        ("handler", row.handler),
        ("topic", row.topic),
        ("biz_id", row.biz_id),
        ("message_id", row.message_id),
        ("key", row.key),
        ("content_type", row.content_type),
        ("body", row.body),
        ("digest", row.digest),
        ("headers", row.headers),
        ("source", row.source),
        ("correlation_id", row.correlation_id),
        ("causation_id", row.causation_id),
        ("traceparent", row.traceparent),
        ("created_at", connection.ops.adapt_datetimefield_value(row.created_at) if row.created_at else None),
        ("state", state.value),
        ("attempts", failure.attempts if failure else 0),
        ("last_error", printable(failure.error, ERROR_LENGTH) if failure else ""),
        ("traceback", printable(failure.traceback, TRACEBACK_LENGTH) if failure else ""),
        ("duplicates", 0),
        ("conflicts", 0),
    ]
    columns = ", ".join([*(column for column, _ in values), "received_at", "settled_at", "next_attempt_at"])
    parameters = [value for _, value in values]
    due = "NULL"
    if due_after is not None:
        due = now_after(connection)
        parameters.append(due_after.total_seconds())
    places = ", ".join([*["%s"] * len(values), now, now if state == State.DEAD else "NULL", due])
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            try:
                # One round trip: bound the wait for a twin, insert, give the transaction its own lock_timeout back.
                cursor.execute(
                    "WITH bound AS MATERIALIZED (SELECT current_setting('lock_timeout') AS before, "
                    f"set_config('lock_timeout', %s, true)) INSERT INTO {TABLE} ({columns}) SELECT {places} FROM bound {_ONCE} "
                    "RETURNING id, pg_current_xact_id()::text, set_config('lock_timeout', (SELECT before FROM bound), true)",
                    [f"{int(twin_timeout.total_seconds() * 1000)}ms", *parameters],
                )
            except OperationalError as error:
                if getattr(error.__cause__, "sqlstate", None) == LOCK_TIMEOUT:
                    raise TwinBusy from error
                raise
        else:
            cursor.execute(f"INSERT INTO {TABLE} ({columns}) VALUES ({places}) {_ONCE} RETURNING id, ''", parameters)
        found = cursor.fetchall()
    return Guard(alias, found[0][0], found[0][1]) if found else None


# ----------------------------------------------------------------------------------------------------------- stored messages


def claim_due(alias: str, handlers: Sequence[str], redelivery_after: timedelta) -> InboxMessage | None:
    """Take one due message of these handlers and count the attempt, in a commit of its own.

    A process that dies in the middle leaves it due again after `redelivery_after`, with the attempt counted, so that a
    message which kills its process runs out of attempts. Nobody waits: a row that another transaction is running is locked
    and skipped, whatever its `next_attempt_at` says.
    """
    connection = connections[alias]
    # Reading first costs nothing on an idle inbox, while an UPDATE of no row would still take SQLite's write lock.
    if not handlers or not next_due(alias, handlers):
        return None
    now = _now(connection)
    due = (
        f"SELECT id FROM {TABLE} WHERE state IN ('received', 'retrying') AND next_attempt_at <= {now} "
        f"AND handler IN ({', '.join(['%s'] * len(handlers))}) ORDER BY next_attempt_at LIMIT 1"
    )
    later = now_after(connection)
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            # Materialised, because a re-evaluated sub-select with LIMIT may take more rows than one.
            sql = (
                f"WITH due AS MATERIALIZED ({due} FOR UPDATE SKIP LOCKED) UPDATE {TABLE} m SET attempts = attempts + 1, "
                f"next_attempt_at = {later} FROM due WHERE m.id = due.id RETURNING m.id"
            )
            parameters: list[Any] = [*handlers, redelivery_after.total_seconds()]
        else:
            sql = f"UPDATE {TABLE} SET attempts = attempts + 1, next_attempt_at = {later} WHERE id = ({due}) RETURNING id"
            parameters = [redelivery_after.total_seconds(), *handlers]
        cursor.execute(sql, parameters)
        found = cursor.fetchall()
    return InboxMessage.objects.using(alias).get(pk=found[0][0]) if found else None


def begin_stored(alias: str, row: int, attempts: int) -> Guard | None:
    """Lock a claimed row as the first statement of the handler's transaction. None: it is not ours any more."""
    connection = connections[alias]
    postgresql = connection.vendor == "postgresql"
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {TABLE} SET state = 'received', next_attempt_at = NULL "
            "WHERE id = %s AND attempts = %s AND state IN ('received', 'retrying') AND next_attempt_at IS NOT NULL "
            f"RETURNING {'pg_current_xact_id()::text' if postgresql else repr('')}",
            [row, attempts],
        )
        found = cursor.fetchall()
        if not found:
            return None
        if not postgresql:
            cursor.execute(f"SAVEPOINT {_SAVEPOINT}")
    return Guard(alias, row, found[0][0])


def rekey(alias: str, row: int, biz_id: str) -> bool:
    """Give a row that was stored without identity the one that is known now. False: another row has it."""
    try:
        with transaction.atomic(using=alias):
            InboxMessage.objects.using(alias).filter(pk=row).update(biz_id=biz_id)
    except IntegrityError:
        return False
    return True


def fail_stored(alias: str, row: int, attempts: int, failure: Failure) -> bool:
    """received | retrying → retrying | dead, after the handler's transaction was rolled back. False: not ours any more."""
    dead = failure.retry_after is None
    return bool(
        InboxMessage.objects.using(alias)
        .filter(pk=row, attempts=attempts, state__in=DUE, next_attempt_at__isnull=False)
        .update(
            state=State.DEAD if dead else State.RETRYING,
            attempts=failure.attempts,
            last_error=printable(failure.error, ERROR_LENGTH),
            traceback=printable(failure.traceback, TRACEBACK_LENGTH),
            next_attempt_at=None if failure.retry_after is None else DatabaseTime(failure.retry_after),
            settled_at=DatabaseTime() if dead else None,
        )
    )


def note_error(alias: str, row: int, failure: Failure) -> None:
    """Write down why an attempt failed that was no longer ours: it outlasted its claim, and another has begun."""
    InboxMessage.objects.using(alias).filter(pk=row, state__in=DUE).update(
        last_error=printable(failure.error, ERROR_LENGTH), traceback=printable(failure.traceback, TRACEBACK_LENGTH)
    )


def give_back(alias: str, row: int, attempts: int) -> None:
    """Uncount a claimed attempt that the database did not let us make, and have it due now."""
    InboxMessage.objects.using(alias).filter(pk=row, attempts=attempts, state__in=DUE, next_attempt_at__isnull=False).update(
        attempts=attempts - 1, next_attempt_at=DatabaseTime()
    )


def bury_abandoned(alias: str, row: int | None = None) -> int:
    """received, visible although a transaction is running it → dead; how many."""
    abandoned = InboxMessage.objects.using(alias).filter(state__in=DUE, next_attempt_at__isnull=True)
    if row is not None:
        abandoned = abandoned.filter(pk=row)
    # Reading first, because an UPDATE of no row would still take SQLite's write lock.
    if not abandoned.exists():
        return 0
    buried: int = abandoned.update(state=State.DEAD, last_error=ABANDONED, settled_at=DatabaseTime())
    return buried


def orphans(alias: str, handlers: Sequence[str]) -> dict[str, int]:
    """How many open messages are stored for handlers that are none of `handlers`, by handler."""
    stored = InboxMessage.objects.using(alias).filter(state__in=DUE).exclude(handler__in=handlers)
    return dict(stored.values_list("handler").annotate(Count("id")).order_by())


def next_due(alias: str, handlers: Sequence[str]) -> bool:
    """Is a stored message of these handlers due now?"""
    return (
        InboxMessage.objects.using(alias)
        .filter(state__in=DUE, next_attempt_at__lte=DatabaseTime(), handler__in=handlers)
        .exists()
    )


# ---------------------------------------------------------------------------------------------------------------- operators

RETRYABLE = (State.DEAD, State.RETRYING, State.RECEIVED)
SKIPPABLE = (State.DEAD, State.RETRYING, State.RECEIVED, State.WAITING)


def retry(alias: str, row: int) -> bool:
    """dead | retrying | received → retrying, due now, with a full set of attempts. False: it is in none of these states.

    While a handler is running the message this waits for its end, for a while, and then tells the truth.
    """
    return _decide(alias, row, RETRYABLE, state=State.RETRYING, attempts=0, next_attempt_at=DatabaseTime(), settled_at=None)


def skip(alias: str, row: int, reason: str) -> bool:
    """dead | retrying | received | waiting → skipped: its effect will not happen. False: it is in none of these states.

    While a handler is running the message this waits for its end, for a while, and then tells the truth.
    """
    return _decide(
        alias,
        row,
        SKIPPABLE,
        state=State.SKIPPED,
        last_error=printable(f"skipped: {reason}", ERROR_LENGTH),
        next_attempt_at=None,
        settled_at=DatabaseTime(),
    )


def _decide(alias: str, row: int, allowed: Sequence[State], **written: Any) -> bool:
    try:
        with transaction.atomic(using=alias), lock_timeout(alias, _OPERATORS_WAIT):
            return bool(InboxMessage.objects.using(alias).filter(pk=row, state__in=allowed).update(**written))
    except OperationalError as error:
        if is_collision(error):
            return False
        raise


def states(alias: str) -> dict[str, int]:
    """How many rows are in each state; every state is named."""
    counted = dict(InboxMessage.objects.using(alias).values_list("state").annotate(Count("id")).order_by())
    return {state.value: counted.get(state, 0) for state in State}


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """Deliveries that had no second effect, and how many of them said something else."""

    suppressed: int
    conflicting: int


def duplicates(alias: str) -> Duplicates:
    sums = InboxMessage.objects.using(alias).aggregate(suppressed=Sum("duplicates"), conflicting=Sum("conflicts"))
    return Duplicates(suppressed=sums["suppressed"] or 0, conflicting=sums["conflicting"] or 0)


def oldest_waiting(alias: str) -> datetime | None:
    """The due time of the stored message that has waited longest past it, or None when none waits."""
    waiting = InboxMessage.objects.using(alias).filter(state__in=DUE, next_attempt_at__lte=DatabaseTime())
    oldest: datetime | None = waiting.aggregate(oldest=Min("next_attempt_at"))["oldest"]
    return oldest


def purge_settled(alias: str, older_than: timedelta, *, chunk: int = 1000) -> Iterator[int]:
    """Delete settled rows older than `older_than`, in small transactions; yields how many went with each.

    Open and dead messages stay until they are settled.
    """
    old = _settled_before(alias, older_than)
    while ids := list(old.order_by("settled_at").values_list("pk", flat=True)[:chunk]):
        yield InboxMessage.objects.using(alias).filter(pk__in=ids, state__in=SETTLED).delete()[0]


def purgeable(alias: str, older_than: timedelta) -> int:
    """How many rows `purge_settled` would delete."""
    count: int = _settled_before(alias, older_than).count()
    return count


def _settled_before(alias: str, older_than: timedelta) -> Any:
    return InboxMessage.objects.using(alias).filter(state__in=SETTLED, settled_at__lt=DatabaseTime(-older_than))


def is_reachable(alias: str) -> bool:
    """Does the database answer on a new connection?"""
    connection = connections[alias]
    try:
        connection.close()
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except (DatabaseError, InterfaceError):
        connection.close()
        return False
    return True


def _now(connection: BaseDatabaseWrapper) -> str:
    return now_after(connection).replace("%s", "0")
