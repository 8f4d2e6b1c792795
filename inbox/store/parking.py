"""Rows of parked deliveries, which are stored as they came, until their message can be identified."""

import json
from dataclasses import replace
from datetime import timedelta

from django.db import transaction

from exactly_once.sql.days import LIVE
from exactly_once.sql.now import DatabaseTime
from inbox.models import InboxMessage
from inbox.states import State
from inbox.store import claims, receipts
from inbox.store.arrivals import count_duplicate
from inbox.store.dialect import IS_OPEN, locked_means_busy
from inbox.store.ordering import deciding, promote_behind
from inbox.store.rows import COLUMNS, Earlier, NewRow, order_of, stored_row


def make_due(alias: str, row: NewRow) -> None:
    """received, parked and due later → due now, because the run of its message has ended."""
    receipts.message_of(alias, row).filter(state=State.RECEIVED, attempts=0).update(next_attempt_at=DatabaseTime())


def identify(alias: str, claimed: InboxMessage, row: NewRow, longest_wait: timedelta) -> bool | None:
    """Make the row of a parked delivery that of its message `row`. False: that has another row. None: the claim has ended.

    A copy that was stored later in the same order is counted on it, so that the message keeps its first place.

    Raises:
        ConcurrentDuplicate: a transaction that is inserting that row did not end within `longest_wait`.
    """
    columns = {name: getattr(row, name) for name in COLUMNS} | {"headers": json.loads(row.headers)}
    with deciding(alias, longest_wait), locked_means_busy:
        later = _later_copy(alias, claimed, row)
        if later is not None:
            receipts.delete(alias, "id = %s", [later.pk])
        named = claims.identify(alias, claimed, columns)
        if not named:
            transaction.set_rollback(True, using=alias)
        elif later is not None:
            count_duplicate(alias, replace(stored_row(later), copies=later.duplicates))
    return named


def _later_copy(alias: str, claimed: InboxMessage, row: NewRow) -> InboxMessage | None:
    if not claimed.ordered:
        return None
    behind = receipts.message_of(alias, row).filter(state=State.WAITING, ordered=True, key=claimed.key, day=LIVE)
    return behind.exclude(pk=claimed.pk).first()


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
        else:
            promote_behind(alias, order_of(claimed))
    return earlier
