"""Deliveries that are stored under a provisional biz-id, until their message and its outcome are known.

The row becomes the row of the message, or is merged into it as a duplicate.
"""

from __future__ import annotations

import json
from datetime import timedelta

from django.db import IntegrityError, connections, transaction

from exactly_once.sql.connections import is_postgresql, lock_timeout
from exactly_once.sql.now import DatabaseTime
from inbox.models import InboxMessage, State
from inbox.store.arrivals import count_duplicate
from inbox.store.dialect import TABLE, adapted, binary, fetch_all
from inbox.store.inserting import Insertion, insert_one
from inbox.store.rows import COLUMNS, DuplicateCause, Earlier, NewRow, locked_means_busy

_COUNTS = ("duplicates", "redeliveries", "resends", "replays")


def begin_reading(alias: str, row: NewRow, duplicate_timeout: timedelta) -> int:
    """∅ | waiting → waiting, outside every order, so that it is not run. Returns how often reading has begun.

    Raises:
        ConcurrentDuplicate: see `begin_fresh`.
    """
    with transaction.atomic(using=alias):
        insert_one(alias, Insertion(row=row, state=State.WAITING), duplicate_timeout)
        with connections[alias].cursor() as cursor:
            cursor.execute(
                f"UPDATE {TABLE} SET attempts = attempts + 1 WHERE handler = %s AND topic = %s AND biz_id = %s "
                "RETURNING attempts",
                [row.handler, row.topic, row.biz_id],
            )
            found = cursor.fetchone()
    return int(found[0]) if found else 0


def end_reading(alias: str, row: NewRow) -> None:
    """waiting → ∅: the body has been read."""
    InboxMessage.objects.using(alias).filter(
        handler=row.handler, topic=row.topic, biz_id=row.biz_id, state=State.WAITING, ordered=False
    ).delete()


def assign_biz_id(alias: str, stored: InboxMessage, row: NewRow, longest_wait: timedelta) -> bool | None:
    """Make a claimed row the row of its message. False: the message has a row. None: the claim has ended.

    Raises:
        ConcurrentDuplicate: another transaction is inserting that row and did not end within `longest_wait`.
    """
    connection = connections[alias]
    postgresql = is_postgresql(connection)
    found = {column: getattr(row, column) for column in COLUMNS} | {"headers": json.loads(row.headers)}
    changed = [name for name, value in found.items() if getattr(stored, name) != value]
    placeholders = {"body": binary(connection), **({"headers": "%s::jsonb"} if postgresql else {})}
    values = [adapted(connection, getattr(row, name)) for name in changed]
    named = ", ".join(f"{name} = {placeholders.get(name, '%s')}" for name in changed) or "id = id"
    sql = f"UPDATE {TABLE} SET {named} WHERE id = %s AND fence = %s RETURNING id"
    try:
        with locked_means_busy, transaction.atomic(using=alias), lock_timeout(alias, longest_wait):
            ours = fetch_all(connection, sql, [*values, stored.pk, stored.fence])
    except IntegrityError:
        return False
    for name in changed:
        setattr(stored, name, found[name])
    return bool(ours) or None


def merge_undecided(
    alias: str, stored: InboxMessage, row: NewRow, longest_wait: timedelta, *, redelivered: bool
) -> Earlier | None:
    """Count a claimed row, and the duplicates counted on it, as duplicates of its message's row, and delete it.

    None: that row has been deleted meanwhile, or the claim has ended.

    Raises:
        ConcurrentDuplicate: another transaction is running that row and did not end within `longest_wait`.
    """
    with transaction.atomic(using=alias):
        _lock_row(alias, row, longest_wait)
        earlier = count_duplicate(alias, row, redelivered=redelivered)
        if earlier is None:
            return None
        with connections[alias].cursor() as cursor:
            cursor.execute(
                f"DELETE FROM {TABLE} WHERE id = %s AND fence = %s RETURNING {', '.join(_COUNTS)}",
                [stored.pk, stored.fence],
            )
            counted = cursor.fetchone()
            if counted is None:
                # Another runner has claimed it.
                transaction.set_rollback(True, using=alias)
                return None
            duplicates, *causes = counted
            if earlier.cause is DuplicateCause.BUSINESS:
                # Duplicates of this delivery are not redeliveries or resends of the row's message.
                causes = [0] * len(causes)
            added = ", ".join(f"{name} = {name} + %s" for name in (*_COUNTS, "conflicts"))
            conflicts = duplicates if earlier.conflicting else 0
            cursor.execute(f"UPDATE {TABLE} SET {added} WHERE id = %s", [duplicates, *causes, conflicts, earlier.row])
    return earlier


def _lock_row(alias: str, row: NewRow, longest_wait: timedelta) -> None:
    named = InboxMessage.objects.using(alias).filter(handler=row.handler, topic=row.topic, biz_id=row.biz_id)
    with locked_means_busy, lock_timeout(alias, longest_wait):
        list(named.select_for_update().values_list("pk"))


def decide_now(alias: str, row: NewRow) -> None:
    """received, undecided and due later → due now, because the run of its message has ended."""
    InboxMessage.objects.using(alias).filter(
        handler=row.handler, topic=row.topic, biz_id=row.biz_id, state=State.RECEIVED, attempts=0
    ).update(next_attempt_at=DatabaseTime())
