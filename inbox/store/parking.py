"""Rows of parked deliveries, which are stored as they came, until their message can be identified."""

from dataclasses import replace
from datetime import timedelta

from django.db import connections, transaction

from exactly_once.sql.now import DatabaseTime
from inbox.models import InboxMessage
from inbox.states import State
from inbox.store import receipts
from inbox.store.arrivals import count_duplicate
from inbox.store.dialect import IS_OPEN, TABLE
from inbox.store.inserting import Insertion, insert_one
from inbox.store.ordering import deciding
from inbox.store.rows import Earlier, NewRow, locked_means_busy


def begin_reading(alias: str, row: NewRow, duplicate_timeout: timedelta) -> int:
    """∅ | waiting → waiting, outside every order, so that it is not run. Returns how often reading has begun.

    Raises:
        ConcurrentDuplicate: see `begin_fresh`.
    """
    with transaction.atomic(using=alias):
        insert_one(alias, Insertion(row=row, state=State.WAITING), duplicate_timeout, recorded=False)
        with connections[alias].cursor() as cursor:
            cursor.execute(
                f"UPDATE {TABLE} SET attempts = attempts + 1 WHERE id = {receipts.ID_OF} RETURNING attempts",
                receipts.name_of(row),
            )
            found = cursor.fetchone()
    return int(found[0]) if found else 0


def end_reading(alias: str, row: NewRow) -> None:
    """waiting → ∅: the body has been read."""
    receipts.delete(alias, f"id = {receipts.ID_OF} AND {IS_OPEN} AND state = 'waiting' AND NOT ordered", receipts.name_of(row))


def make_due(alias: str, row: NewRow) -> None:
    """received, parked and due later → due now, because the run of its message has ended."""
    receipts.message_of(alias, row).filter(state=State.RECEIVED, attempts=0).update(next_attempt_at=DatabaseTime())


def count(alias: str, claimed: InboxMessage, row: NewRow, longest_wait: timedelta) -> Earlier | None:
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
    return earlier
