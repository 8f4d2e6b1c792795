"""Rows of Celery tasks. Celery delivers and retries them, so an open row is run by the delivery that finds it.

Such a row exists while a redelivered message is running, and after a worker died while running it. A task that fails normally
leaves none: Celery decides what comes next.
"""

import json
from dataclasses import dataclass
from datetime import timedelta

from django.db import connections

from exactly_once.sql.connections import fetch, is_postgresql
from exactly_once.sql.days import LIVE
from exactly_once.sql.now import now_after
from inbox.models import InboxMessage
from inbox.states import State
from inbox.store import receipts
from inbox.store.dialect import IS_OPEN, RECEIPTS, TABLE
from inbox.store.message_rows import NewRow


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """The outcome of a message.

    Attributes:
        result: its handler's result as JSON; None if that is unknown.
    """

    state: State
    result: str | None
    last_error: str


def claim_existing(alias: str, row: NewRow, redelivery_after: timedelta) -> InboxMessage | None:
    """received | retrying, its attempt counted, in its own commit: the existing row of this delivery.

    None: another transaction is handling it, or there is nothing to run.
    """
    connection = connections[alias]
    skip_locked = "FOR UPDATE SKIP LOCKED" if is_postgresql(connection) else ""
    sql = (
        f"UPDATE {TABLE} SET attempts = attempts + 1, fence = fence + 1, next_attempt_at = {now_after(connection)} "
        f"WHERE {IS_OPEN} AND id = (SELECT id FROM {TABLE} WHERE id = {receipts.ID_OF} "
        f"AND {IS_OPEN} AND state IN ('received', 'retrying') AND next_attempt_at IS NOT NULL {skip_locked}) RETURNING id"
    )
    found = fetch(connection, sql, [redelivery_after.total_seconds(), *receipts.name_of(row)])
    return InboxMessage.objects.using(alias).get(pk=found[0][0], day=LIVE) if found else None


def delete_failed(alias: str, claimed: InboxMessage) -> bool:
    """received → ∅, after the task failed normally. False: it is no longer ours."""
    ours = f"id = %s AND {IS_OPEN} AND fence = %s AND state = 'received' AND next_attempt_at IS NOT NULL"
    return bool(receipts.delete(alias, ours, [claimed.pk, claimed.fence]))


def store_signature(alias: str, row: NewRow, headers: str) -> None:
    """Store how the task of `row` was sent, after its row has become a dead letter."""
    receipts.open_message(alias, row).filter(message_id=row.message_id).update(headers=json.loads(headers))


def outcome(alias: str, row: NewRow) -> TaskOutcome | None:
    """The outcome of the message that `row` repeats; None if it was deleted. One without history is taken to be done."""
    ids = [pk for (pk,) in fetch(connections[alias], f"SELECT {receipts.ID_OF}", receipts.name_of(row)) if pk]
    days = ", ".join(map(str, {LIVE, *receipts.days_of(alias, ids).values()}))
    sql = (
        "SELECT COALESCE(m.state, 'done'), CAST(m.result AS text), COALESCE(m.last_error, '') "
        f"FROM {RECEIPTS} r LEFT JOIN {TABLE} m ON m.id = r.id AND m.day IN ({days}) WHERE r.id = %s"
    )
    found = [each for pk in ids for each in fetch(connections[alias], sql, [pk])]
    return next((TaskOutcome(State(state), result, error) for state, result, error in found), None)
