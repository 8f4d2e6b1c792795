"""The rows of messages whose lease is in Redis, and the record of its data losses."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Greatest

from exactly_once.sql.days import LIVE
from exactly_once.sql.now import DatabaseTime
from inbox.models import InboxMessage, LeaseMemory, Receipt
from inbox.states import DUE, State
from inbox.store import receipts
from inbox.store.arrivals import insert_one
from inbox.store.claims import refunded, under_claim
from inbox.store.duplicates import COUNTED_AS
from inbox.store.failure_columns import as_failed
from inbox.store.lease_rows import done_columns, remember_all
from inbox.store.message_rows import DuplicateCause, Failure, NewRow, OrderedKey, attributes_of
from inbox.store.ordering import deciding, promote_behind
from inbox.store.trail_entries import update


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

    False: the row exists.

    Args:
        duplicate: the row is that of a delivery that has none and is being run; this one is counted as its duplicate.
        conflicting: this one has other content.
        stopping: the process that runs it has been asked to stop.

    Raises:
        ConcurrentDuplicate: see `begin_fresh`.
    """
    with transaction.atomic(using=alias, savepoint=False) if duplicate else nullcontext():
        seconds = until.total_seconds()
        pk = insert_one(alias, row, State.RUNNING, duplicate_timeout, due_after=seconds, attempts=attempts)
        if pk is not None and duplicate is not None:
            counts: dict[str, Any] = {"duplicates": 1, **({COUNTED_AS[duplicate]: 1} if duplicate in COUNTED_AS else {})}
            if conflicting:
                counts |= {"conflicts": 1, "conflicting_id": row.message_id, "conflicting_body": row.body}
                counts |= {"conflicting_at": DatabaseTime(), "conflicting_attributes": json.loads(attributes_of(row))}
            InboxMessage.objects.using(alias).filter(pk=pk, day=LIVE).update(**counts, stopping=stopping)
    return pk is not None


def may_renew(alias: str, row: NewRow, fence: int) -> bool:
    """Has its row, if it has one, still this fence, so that no runner has claimed it and no operator has decided about it?"""
    rows = receipts.named(alias, row.handler, row.topic, row.biz_id).values_list("state", "fence")
    return all(found == (State.RUNNING, fence) for found in rows)


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
    with deciding(alias) if order else transaction.atomic(using=alias):
        open_row = _locked(alias, row)
        if open_row is not None:
            content = {**(_content_of(alias, row) if delivered else {}), **done_columns()}
            columns = {**content, "attempts": Greatest(F("attempts") - uncounted, 0)}
            update(alias, _same(alias, open_row), columns, was=open_row.state, matters=False)
        promote_behind(alias, order)
    return open_row is not None


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
    with deciding(alias) if leaves else transaction.atomic(using=alias):
        store_external(alias, row, duplicate_timeout, until=timedelta(), attempts=failure.attempts)
        written = as_failed(failure, leaves_order=leaves is not None)
        if (open_row := _locked(alias, row)) is None:
            return None
        written |= {**_content_of(alias, row), "fence": Greatest(F("fence"), fence)}
        matters = not failure.deferred
        update(alias, _same(alias, open_row), written, was=open_row.state, reason=failure.error, matters=matters)
        remember_all(alias, open_row.pk, steps)
        promote_behind(alias, leaves)
    return int(open_row.pk)


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


def show_stopping(alias: str, pk: int) -> None:
    """A process that runs it under an external lease has been asked to stop. The row does not know its present owner."""
    InboxMessage.objects.using(alias).filter(pk=pk, day=LIVE, state=State.RUNNING).update(stopping=True)


def _locked(alias: str, row: NewRow) -> InboxMessage | None:
    """The open row of this message, locked."""
    found: InboxMessage | None = receipts.open_message(alias, row).filter(state__in=DUE).select_for_update().first()
    return found


def _same(alias: str, open_row: InboxMessage) -> Any:
    return InboxMessage.objects.using(alias).filter(pk=open_row.pk, day=LIVE)


def _content_of(alias: str, row: NewRow) -> dict[str, Any]:
    """The columns of the delivery that was run. Its receipt, which a duplicate may have stored, gets them, too."""
    named = {"message_id": row.message_id, "digest": row.digest}
    receipt = Receipt.objects.using(alias).filter(handler=row.handler, topic=row.topic, biz_id=row.biz_id)
    receipt.exclude(digest=row.digest).update(**named)
    return {**named, "content_type": row.content_type, "body": row.body, "headers": json.loads(row.headers)}
