"""Pending callbacks: one row for each, from the transaction that settles the message until the callback has returned.

A call is two transactions. The first claims the row for the duration of a lease, so that no other process begins the call, and
the row is due again if the process dies. The second deletes the row and runs the callback; the number of the call is its
fencing token. The database limits the duration of the second transaction, because nothing else ends a callback that hangs.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, connections, transaction
from django.db.models import Count, F, Min, Q

from exactly_once.sql.connections import execute, is_postgresql
from exactly_once.sql.deletions import delete_matching
from exactly_once.sql.faults import is_outage
from exactly_once.sql.fields import value_of
from exactly_once.sql.now import DatabaseTime, now
from exactly_once.sql.partitions import soon_after
from exactly_once.states import Transition
from exactly_once.wire.envelope import REPLAY_HEADER
from exactly_once.wire.formats import Wire
from exactly_once.wire.text import ERROR_LENGTH, describe, printable
from outbox.callbacks import SettledMessage, registry
from outbox.models import OutboxMessage, PendingCallback
from outbox.store.dialect import TABLE, some_uuids
from outbox.store.selecting import identified

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models import QuerySet

_PENDING = PendingCallback._meta.db_table
_AFTER_AN_OUTAGE = timedelta(seconds=1)


@dataclass(frozen=True, kw_only=True)
class DueCall:
    """A claimed callback.

    Attributes:
        callback: its name.
        number: of this call, counted from 1; a call with a higher number has replaced it.
    """

    alias: str
    pending: int
    callback: str
    event: str
    number: int

    def __str__(self) -> str:
        return f"{self.callback} ({self.event}), call {self.number}"


class CallLost(Exception):
    """Another process has claimed the call, or its transaction cannot commit."""


def topics_with_callbacks(transition: Transition) -> set[str]:
    """The topics that have a callback for this transition."""
    return {topic for topic, event, _ in registry if event in transition.targets}


def needed_by_callbacks(transition: Transition) -> tuple[str, list[str]]:
    """The condition of a message `m` that has a pending callback, or gets one by this transition; and its parameters."""
    topics = sorted(topics_with_callbacks(transition))
    pending = f"EXISTS (SELECT 1 FROM {_PENDING} p WHERE p.message_id = m.message_id)"
    return " OR ".join([pending, *["m.topic = %s"] * len(topics)]), topics


def record_calls(connection: BaseDatabaseWrapper, days: Mapping[uuid.UUID, int]) -> None:
    """Insert the pending callbacks of messages, in the transaction that settled them.

    Args:
        days: of the messages, by their ids.
    """
    wanted = list(registry)
    if not (wanted and days):
        return
    ids, parameter = some_uuids(connection, days)
    values = ", ".join(["(%s, %s, %s)"] * len(wanted))
    execute(
        connection,
        f"INSERT INTO {_PENDING} (message_id, event, settled_at, reason, callback, attempts, available_at, last_error) "
        f"WITH wanted(topic, event, callback) AS (VALUES {values}) "
        "SELECT m.message_id, wanted.event, m.settled_at, m.last_error, wanted.callback, 0, "
        f"{now(connection)}, '' FROM {TABLE} m JOIN wanted ON wanted.topic = m.topic AND wanted.event = m.state "
        f"WHERE m.message_id IN (SELECT id FROM {ids}) AND m.day IN ({', '.join(map(str, {*days.values()}))}) ORDER BY m.id",
        [*(part for one in wanted for part in one), parameter],
    )


def claim_calls(alias: str, limit: int, lease: timedelta, *, without: Collection[str] = ()) -> list[DueCall]:
    """Claim up to `limit` due callbacks that this process's code has; no other process begins them before `lease` has ended.

    Others stay due for a process that has them: during a deploy, the new one. So do those of the names in `without`.
    """
    names = [name for name in registry.names if name not in without]
    due = _rows(alias).filter(callback__in=names, available_at__lte=DatabaseTime()).order_by("available_at", "pk")
    # An idle relay must not take SQLite's write lock.
    if not due.exists():
        return []
    with transaction.atomic(using=alias, durable=True):
        found = due.select_for_update(skip_locked=True).values_list("pk", "callback", "event", "attempts")[:limit]
        claimed = [
            DueCall(alias=alias, pending=pending, callback=callback, event=event, number=attempts + 1)
            for pending, callback, event, attempts in found
        ]
        _rows(alias).filter(pk__in=[call.pending for call in claimed]).update(
            attempts=F("attempts") + 1, available_at=DatabaseTime(lease)
        )
    return claimed


def begin_call(call: DueCall) -> SettledMessage:
    """Delete the row, in the transaction in which the callback then runs; returns its argument.

    On PostgreSQL this locks the row until the end, so no second call begins while a slow callback runs.

    Raises:
        CallLost: another process has claimed the call.
    """
    ours = _rows(call.alias).filter(pk=call.pending, attempts=call.number)
    pending = ours.first()
    if pending is None or not delete_matching(ours):
        raise CallLost("another process had claimed it before it began")
    pending.message = identified(call.alias, [pending.message_id], soon_after(pending.settled_at)).get()
    return _settled(pending, call.alias)


def finish_call(call: DueCall) -> None:
    """Check with the last statement of the transaction that it is still the one that deleted the row.

    Otherwise a callback that swallows a database error, or ends the transaction behind Django's back, would lose its effect
    unnoticed.

    Raises:
        CallLost: the transaction was rolled back, or cannot commit.
        django.db.Error: the database became unavailable, or ended the transaction.
    """
    try:
        intact = not connections[call.alias].closed_in_transaction and not _rows(call.alias).filter(pk=call.pending).exists()
    except DatabaseError as error:
        if is_outage(error):
            raise
        raise CallLost(
            f"it returned, but its transaction cannot commit, as after a swallowed error: {describe(error)}"
        ) from error
    if not intact:
        raise CallLost("it returned, but it had its transaction rolled back behind Django's back")


def defer_call(call: DueCall, error: str, backoff: timedelta) -> bool:
    """Record a failed call, which is due again after `backoff`. False: its row is deleted, or another process has it."""
    return bool(
        _rows(call.alias)
        .filter(pk=call.pending, attempts=call.number)
        .update(available_at=DatabaseTime(backoff), last_error=printable(error, ERROR_LENGTH))
    )


def extend_call_lease(call: DueCall, lease: timedelta, said: str) -> None:
    """Renew the lease of a call that is still running, so that no other process begins it.

    While its transaction is open the row is locked, and claims skip it anyway. On SQLite no other process writes then.
    """
    if not is_postgresql(connections[call.alias]):
        return
    ours = _rows(call.alias).filter(pk=call.pending, attempts=call.number)
    with transaction.atomic(using=call.alias, durable=True):
        if ours.select_for_update(skip_locked=True).first() is not None:
            ours.update(available_at=DatabaseTime(lease), last_error=printable(said, ERROR_LENGTH))


def give_back_call(call: DueCall) -> None:
    """Undo the claim of a call during which the database became unavailable: it is not counted, and is due again."""
    _rows(call.alias).filter(pk=call.pending, attempts=call.number).update(
        attempts=F("attempts") - 1, available_at=DatabaseTime(_AFTER_AN_OUTAGE)
    )


def _settled(pending: PendingCallback, alias: str) -> SettledMessage:
    message = pending.message
    return value_of(
        SettledMessage,
        message,
        event=pending.event,
        error=pending.reason,
        using=alias,
        id=message.message_id,
        payload=_payload(message),
        headers=_headers(message),
        settled_at=pending.settled_at,
        call=pending.attempts,
    )


def _headers(message: OutboxMessage) -> dict[str, Any]:
    # In a row that was damaged by hand they may be any JSON value.
    headers = message.headers if isinstance(message.headers, dict) else {}
    return {name: value for name, value in headers.items() if name != REPLAY_HEADER}


def _payload(message: OutboxMessage) -> Any:
    body = bytes(message.body)
    if message.wire is not None and Wire.from_text(message.wire).content_type != "application/json":
        return body
    return json.loads(body)


def _rows(alias: str) -> QuerySet[PendingCallback]:
    return PendingCallback.objects.using(alias)


@dataclass(frozen=True, kw_only=True)
class PendingCalls:
    """The number of pending callbacks.

    Attributes:
        pending: all of them.
        failing: those that have failed or been interrupted at least once.
        unknown: those of a name that this process's code does not have.
        oldest: when the message of the oldest one was settled; None if there is none.
    """

    pending: int
    failing: int
    unknown: int
    oldest: datetime | None


def pending_calls(alias: str) -> PendingCalls:
    """Count the pending callbacks."""
    counted = PendingCallback.objects.using(alias).aggregate(
        pending=Count("pk"),
        failing=Count("pk", filter=~Q(last_error="") | Q(attempts__gt=1)),
        unknown=Count("pk", filter=~Q(callback__in=registry.names)),
        oldest=Min("settled_at"),
    )
    return PendingCalls(**counted)
