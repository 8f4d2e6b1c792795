"""The right to run one message outside any transaction, stored in the message's own row.

A `running` row belongs to the owner of its latest *fence*, until `next_attempt_at`. Every statement here that acts for an owner
names its fence, and is refused once the lease has ended by the database's clock or another owner has taken it.

This module also writes the rows of messages whose lease is in an external store, and the record of that store's data losses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connections, transaction
from django.db.models import F
from django.db.models.functions import Greatest

from exactly_once.sql.connections import is_postgresql
from exactly_once.sql.now import DatabaseTime, now, now_after
from exactly_once.sql.prepared_statements import PreparedStatement, is_usable
from inbox.conf import inbox_options
from inbox.models import DUE, InboxMessage, LeaseMemory, State
from inbox.store.arrivals import store_running
from inbox.store.claims import refunded, under_claim
from inbox.store.dialect import BOUND, LONGEST_LOCK_WAIT, TABLE, as_bound
from inbox.store.failures import NO_FAILURE, as_written
from inbox.store.inserting import insert_leased
from inbox.store.ordering import deciding, hold_gates, promote_next
from inbox.store.rows import DuplicateCause, Failure, KeyBusy, NewRow, OrderedKey, locked_means_busy
from inbox.store.sentinel import EMPTIED
from inbox.store.steps import remember_all
from inbox.store.trail import is_recorded, record, record_leaving, recording

_LEASE_OVER = "its lease had ended: its process died, or the run took longer than the lease"
_OPEN_ROW = "handler = %s AND topic = %s AND biz_id = %s AND state IN ('received', 'retrying', 'running')"
# Without CASE the planner would use a partial index, and read the dead entries of leases that have ended since the last vacuum.
_OWNED = "CASE WHEN state = 'running' AND next_attempt_at > statement_timestamp() THEN TRUE ELSE FALSE END"
_CONSUME = {
    keep_body: PreparedStatement(
        "inbox_consume" if keep_body else "inbox_consume_emptied",
        ["bigint", "bigint"],
        f"UPDATE {TABLE} SET state = 'done', settled_at = statement_timestamp(), next_attempt_at = NULL, last_error = '', "
        "traceback = '', error_class = '', error_place = '', failing_since = NULL"
        f"{'' if keep_body else EMPTIED['postgresql']} WHERE id = $1 AND fence = $2 AND {_OWNED}",
    )
    for keep_body in (True, False)
}


@dataclass(frozen=True, slots=True)
class Granted:
    """A lease on a row: the row, the attempt and the fencing token."""

    row: int
    attempt: int
    fence: int


@dataclass(frozen=True, slots=True)
class Standing:
    """The existing row of a delivery that got no lease; `remaining` is the time until its lease ends, if it is running."""

    state: str
    remaining: timedelta


def lease_fresh(alias: str, row: NewRow, lease: timedelta, duplicate_timeout: timedelta) -> Granted | None:
    """∅ → running, its first attempt counted. None: the row exists.

    Raises:
        ConcurrentDuplicate: see `begin_fresh`.
    """
    connection = connections[alias]
    if not is_recorded(matters=False) and is_usable(connection):
        pk = insert_leased(connection, row, lease, duplicate_timeout)
    else:
        pk = store_running(alias, row, duplicate_timeout, ends_after=lease, attempts=1, fence=1)
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
    one = f"CASE WHEN {ours} THEN 0 ELSE 1 END"
    places = ours.count("%s")
    with transaction.atomic(using=alias), connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {TABLE} SET attempts = attempts + {one}, fence = fence + {one}, stopping = false, "
            f"next_attempt_at = {now_after(connection)} "
            "WHERE handler = %s AND topic = %s AND biz_id = %s AND digest = %s AND state = 'running' "
            f"AND (next_attempt_at <= {now(connection)} OR {ours}) RETURNING id, attempts, fence",
            [
                *[seconds] * (2 * places + 1),
                *(row.handler, row.topic, row.biz_id, row.digest),
                *[seconds] * places,
            ],
        )
        found = cursor.fetchall()
        granted = Granted(*found[0]) if found else None
        if granted and granted.fence > 1:  # fence 1 is a lease that was granted before
            record(alias, [granted.row], was=State.RUNNING, reason=_LEASE_OVER)
    return granted


def lease_stored(
    alias: str, claimed: InboxMessage, lease: timedelta, exclusive_key: OrderedKey | None = None
) -> Granted | None:
    """received | retrying | running, claimed → running, under the fence of the claim. None: it is no longer ours.

    Args:
        exclusive_key: no other message of this key may run at the same time.

    Raises:
        KeyBusy: another one is running. Give the row back.
        ConcurrentDuplicate: another session has locked the row and does not release it.
    """
    connection = connections[alias]
    bound, among, wait = "", "", []
    if is_postgresql(connection):
        bound, among, wait = BOUND, "FROM bound", [as_bound(LONGEST_LOCK_WAIT)]
    with (
        locked_means_busy,
        _in_order(alias, exclusive_key, matters=claimed.state == State.RUNNING),
        connection.cursor() as cursor,
    ):
        cursor.execute(
            f"{bound} UPDATE {TABLE} SET state = 'running', stopping = false, next_attempt_at = {now_after(connection)} "
            f"{among} WHERE id = %s AND fence = %s AND state IN ('received', 'retrying', 'running') "
            "AND next_attempt_at IS NOT NULL RETURNING id, attempts, fence",
            [*wait, lease.total_seconds(), claimed.pk, claimed.fence],
        )
        found = cursor.fetchall()
        if found:
            _record_running(alias, claimed)
        _refuse_concurrent_run(alias, claimed.pk, exclusive_key)
    return Granted(*found[0]) if found else None


def standing(alias: str, row: NewRow) -> Standing | None:
    """The state and lease of this message's stored row; None if there is none."""
    connection = connections[alias]
    left = (
        f"EXTRACT(EPOCH FROM next_attempt_at - {now(connection)})"
        if is_postgresql(connection)
        else f"(JULIANDAY(next_attempt_at) - JULIANDAY({now(connection)})) * 86400"
    )
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT state, {left} FROM {TABLE} WHERE handler = %s AND topic = %s AND biz_id = %s",
            [row.handler, row.topic, row.biz_id],
        )
        found = cursor.fetchone()
    return None if found is None else Standing(found[0], timedelta(seconds=max(float(found[1] or 0), 0)))


def extend(alias: str, pk: int, fence: int, lease: timedelta, *, stopping: bool = False) -> bool:
    """running → running, until `lease` from now. False: it is no longer ours.

    Args:
        stopping: its process has been asked to stop.
    """
    return bool(_owned(alias, pk, fence).update(next_attempt_at=DatabaseTime(lease), stopping=stopping))


def show_stopping(alias: str, pk: int) -> None:
    """A process that runs it under an external lease has been asked to stop. The row does not know its present owner."""
    InboxMessage.objects.using(alias).filter(pk=pk, state=State.RUNNING).update(stopping=True)


def consume(alias: str, pk: int, fence: int, order: OrderedKey | None = None) -> bool:
    """running → done, and promote the next one of its `order`. False: it is no longer ours."""
    connection = connections[alias]
    if order is None and not is_recorded(matters=False) and is_usable(connection):
        done = _CONSUME[inbox_options().keeps_all_bodies].execute(connection, [pk, fence]).hit
        return bool(done) or _is_in_state(alias, pk, fence, State.DONE)
    with _in_order(alias, order, matters=False):
        done = _owned(alias, pk, fence).update(**_done())
        record(alias, [pk] if done else [], was=State.RUNNING, matters=False)
        _promote(alias, order)
    # After a connection lost during the commit, this is called again.
    return bool(done) or _is_in_state(alias, pk, fence, State.DONE)


def free(alias: str, pk: int, fence: int, failure: Failure, leaves: OrderedKey | None = None) -> bool:
    """running → retrying | dead, which ends the lease. False: it is no longer ours.

    A dead letter keeps its place in the order of its key, unless it `leaves` that order, which promotes the next one.
    """
    written, matters = _failed(failure, leaves), not failure.deferred
    with _in_order(alias, leaves, matters=matters):
        freed = _owned(alias, pk, fence).update(**written)
        record(alias, [pk] if freed else [], was=State.RUNNING, reason=failure.error, matters=matters)
        _promote(alias, leaves)
    return bool(freed) or _is_in_state(alias, pk, fence, State.RETRYING, State.DEAD)


def store_external(
    alias: str,
    row: NewRow,
    duplicate_timeout: timedelta,
    *,
    until: timedelta,
    attempts: int,
    duplicate: DuplicateCause | None = None,
    conflicting: bool = False,
    stopping: bool = False,
) -> bool:
    """∅ → running, for a message that runs under an external lease; the runner checks it when that lease ends.

    False: the row exists. For the other arguments and errors see `store_running`.

    Args:
        stopping: the process that runs it has been asked to stop.
    """
    stored = store_running(
        alias,
        row,
        duplicate_timeout,
        ends_after=until,
        attempts=attempts,
        fence=0,
        duplicate=duplicate,
        conflicting=conflicting,
    )
    if stored is not None and stopping:
        show_stopping(alias, stored)
    return stored is not None


def mark_running(
    alias: str, claimed: InboxMessage, fence: int, lease: timedelta, exclusive_key: OrderedKey | None = None
) -> bool:
    """received | retrying | running, claimed → running under an external lease. False: it is no longer ours.

    Raises:
        KeyBusy, ConcurrentDuplicate: see `lease_stored`.
    """
    with locked_means_busy, deciding(alias, LONGEST_LOCK_WAIT):
        marked = under_claim(alias, claimed).update(
            state=State.RUNNING, fence=fence, stopping=False, next_attempt_at=DatabaseTime(lease)
        )
        if marked:
            _record_running(alias, claimed)
        _refuse_concurrent_run(alias, claimed.pk, exclusive_key)
    return bool(marked)


def defer_to_lease_end(alias: str, claimed: InboxMessage, until: timedelta) -> None:
    """claimed → running, until the external lease of another owner ends; refunds the attempt."""
    written = {**refunded(claimed), "state": State.RUNNING, "next_attempt_at": DatabaseTime(until)}
    under_claim(alias, claimed).update(**written)


def finish_external(
    alias: str, row: NewRow, order: OrderedKey | None = None, *, delivered: bool = False, uncounted: int = 0
) -> bool:
    """received | retrying | running → done, as its external lease store reports. False: there is no such row.

    Args:
        delivered: a delivery was run; the row, which a duplicate may have stored, gets the content of that delivery.
        uncounted: attempts that were claimed but not made.
    """
    with _in_order(alias, order, matters=False):
        record_leaving(alias, _OPEN_ROW, _named(row), became=State.DONE, matters=False)
        written = {**(_content_of(row) if delivered else {}), **_done(), "attempts": Greatest(F("attempts") - uncounted, 0)}
        done = _open_row(alias, row).update(**written)
        _promote(alias, order)
    return bool(done)


def fail_external(
    alias: str,
    row: NewRow,
    failure: Failure,
    *,
    fence: int,
    steps: Mapping[str, str | None],
    duplicate_timeout: timedelta,
    leaves: OrderedKey | None = None,
) -> int | None:
    """∅ | received | retrying | running → retrying | dead, as its external lease store reports; the row.

    It gets the steps and the content of the failed message, because a duplicate may have stored it. None: the row is settled.

    Raises:
        ConcurrentDuplicate: see `begin_fresh`.
    """
    with transaction.atomic(using=alias), _in_order(alias, leaves, matters=True):
        store_external(alias, row, duplicate_timeout, until=timedelta(), attempts=failure.attempts)
        written = _failed(failure, leaves)
        record_leaving(
            alias, _OPEN_ROW, _named(row), became=written["state"], reason=failure.error, matters=not failure.deferred
        )
        if not _open_row(alias, row).update(**written, **_content_of(row), fence=Greatest(F("fence"), fence)):
            return None
        pk: int = InboxMessage.objects.using(alias).get(handler=row.handler, topic=row.topic, biz_id=row.biz_id).pk
        remember_all(alias, pk, steps)
        _promote(alias, leaves)
    return pk


def recorded_incarnation(alias: str, store: str, incarnation: str) -> tuple[str, datetime | None]:
    """The recorded incarnation of an external lease store, and the time since which its data is complete; None: always.

    At the first use of a store, `incarnation` is recorded.
    """
    state, _ = LeaseMemory.objects.using(alias).get_or_create(store=store, defaults={"incarnation": incarnation})
    return state.incarnation, state.remembers_since


def record_loss(alias: str, store: str, *, known: str, found: str) -> bool:
    """Record that the store has lost data and is a new incarnation, complete from now on. False: this was recorded before."""
    lost = LeaseMemory.objects.using(alias).filter(store=store, incarnation=known)
    return bool(lost.update(incarnation=found, remembers_since=DatabaseTime()))


def _record_running(alias: str, claimed: InboxMessage) -> None:
    over = claimed.state == State.RUNNING
    record(alias, [claimed.pk], was=claimed.state, reason=_LEASE_OVER if over else "", matters=over)


def _named(row: NewRow) -> list[str]:
    return [row.handler, row.topic, row.biz_id]


def _owned(alias: str, pk: int, fence: int) -> Any:
    return InboxMessage.objects.using(alias).filter(pk=pk, fence=fence, state=State.RUNNING, next_attempt_at__gt=DatabaseTime())


def _open_row(alias: str, row: NewRow) -> Any:
    return InboxMessage.objects.using(alias).filter(handler=row.handler, topic=row.topic, biz_id=row.biz_id, state__in=DUE)


def _is_in_state(alias: str, pk: int, fence: int, *states: State) -> bool:
    found: bool = InboxMessage.objects.using(alias).filter(pk=pk, fence=fence, state__in=states).exists()
    return found


def _content_of(row: NewRow) -> dict[str, Any]:
    content: dict[str, Any] = {name: getattr(row, name) for name in ("message_id", "content_type", "body", "digest")}
    return {**content, "headers": json.loads(row.headers)}


def _done() -> dict[str, Any]:
    return {
        "state": State.DONE,
        "settled_at": DatabaseTime(),
        "next_attempt_at": None,
        **NO_FAILURE,
        **({} if inbox_options().keeps_all_bodies else {"body": b"", "headers": {}}),
    }


def _failed(failure: Failure, leaves: OrderedKey | None) -> dict[str, Any]:
    dead = failure.retry_after is None
    return {
        "state": State.DEAD if dead else State.RETRYING,
        "attempts": failure.attempts,
        **as_written(failure),
        "next_attempt_at": None if failure.retry_after is None else DatabaseTime(failure.retry_after),
        "settled_at": DatabaseTime() if dead else None,
        **({"ordered": False} if leaves else {}),
    }


def _in_order(alias: str, order: OrderedKey | None, *, matters: bool) -> AbstractContextManager[Any]:
    """A transaction for a change of a key's order, or for the trail; a change without either needs none."""
    return deciding(alias) if order else recording(alias, matters=matters)


def _promote(alias: str, order: OrderedKey | None) -> None:
    if order:
        hold_gates(alias, order.handler, [order.key])
        promote_next(alias, *order)


def _refuse_concurrent_run(alias: str, pk: int, exclusive_key: OrderedKey | None) -> None:
    """Raise KeyBusy if another message of the key is running. Under the gate one of two concurrent runs sees the other."""
    if exclusive_key is None:
        return
    hold_gates(alias, exclusive_key.handler, [exclusive_key.key])
    others = InboxMessage.objects.using(alias).filter(
        handler=exclusive_key.handler, key=exclusive_key.key, state=State.RUNNING, next_attempt_at__gt=DatabaseTime()
    )
    if others.exclude(pk=pk).exists():
        raise KeyBusy
