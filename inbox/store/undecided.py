"""Deliveries that are stored under a provisional biz-id, until it is known which message they carry and that it is handled.

Their row becomes the row of the message, or is a duplicate of the message's row.
"""

from __future__ import annotations

import json
from datetime import timedelta

from django.db import IntegrityError, connections, transaction

from inbox.models import InboxMessage, State
from inbox.store.arrivals import count_duplicate
from inbox.store.dialect import TABLE, adapted, binary, fetch_all
from inbox.store.inserting import Insertion, insert_one
from inbox.store.rows import COLUMNS, DuplicateCause, Earlier, NewRow, locked_means_busy
from outbox.database.connections import is_postgresql, lock_timeout
from outbox.database.now import DatabaseTime

_COUNTS = ("duplicates", "redeliveries", "resends", "replays")


def begin_reading(alias: str, row: NewRow, duplicate_timeout: timedelta) -> int:
    """∅ | waiting → waiting, outside of every order, so that no runner runs it; how often that was done.

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


def name_undecided(alias: str, stored: InboxMessage, row: NewRow, longest_wait: timedelta) -> bool | None:
    """Make a claimed row the row of its message. False: the message has a row. None: the claim has ended.

    Raises:
        ConcurrentDuplicate: another transaction is inserting that row and did not end within `longest_wait`.
    """
    connection = connections[alias]
    postgresql = is_postgresql(connection)
    found = {column: getattr(row, column) for column in COLUMNS} | {"headers": json.loads(row.headers)}
    changed = [name for name, value in found.items() if getattr(stored, name) != value]
    places = {"body": binary(connection), **({"headers": "%s::jsonb"} if postgresql else {})}
    given = [adapted(connection, getattr(row, name)) for name in changed]
    named = ", ".join(f"{name} = {places.get(name, '%s')}" for name in changed) or "id = id"
    sql = f"UPDATE {TABLE} SET {named} WHERE id = %s AND attempts = %s RETURNING id"
    try:
        with locked_means_busy(), transaction.atomic(using=alias), lock_timeout(alias, longest_wait):
            ours = fetch_all(connection, sql, [*given, stored.pk, stored.attempts])
    except IntegrityError:
        return False
    for name in changed:
        setattr(stored, name, found[name])
    return bool(ours) or None


def fold_undecided(
    alias: str, stored: InboxMessage, row: NewRow, longest_wait: timedelta, *, redelivered: bool
) -> Earlier | None:
    """Count a claimed row, and the duplicates counted on it, as duplicates of its message's row, and delete it.

    None: that row has been deleted meanwhile, or the claim has ended.

    Raises:
        ConcurrentDuplicate: another transaction is running that row and did not end within `longest_wait`.
    """
    with transaction.atomic(using=alias):
        _lock(alias, row, longest_wait)
        earlier = count_duplicate(alias, row, redelivered=redelivered)
        if earlier is None:
            return None
        with connections[alias].cursor() as cursor:
            cursor.execute(
                f"DELETE FROM {TABLE} WHERE id = %s AND attempts = %s RETURNING {', '.join(_COUNTS)}",
                [stored.pk, stored.attempts],
            )
            counted = cursor.fetchone()
            if counted is None:
                # Its claim has ended; another runner has it.
                transaction.set_rollback(True, using=alias)
                return None
            duplicates, *causes = counted
            if earlier.cause is DuplicateCause.BUSINESS:
                # They were copies of this delivery, not of the row's message.
                causes = [0] * len(causes)
            added = ", ".join(f"{name} = {name} + %s" for name in (*_COUNTS, "conflicts"))
            conflicts = duplicates if earlier.conflicting else 0
            cursor.execute(f"UPDATE {TABLE} SET {added} WHERE id = %s", [duplicates, *causes, conflicts, earlier.row])
    return earlier


def _lock(alias: str, row: NewRow, longest_wait: timedelta) -> None:
    named = InboxMessage.objects.using(alias).filter(handler=row.handler, topic=row.topic, biz_id=row.biz_id)
    with locked_means_busy(), lock_timeout(alias, longest_wait):
        list(named.select_for_update().values_list("pk"))


def decide_now(alias: str, row: NewRow) -> None:
    """received, undecided and due later → due now: the run that it waited for has ended."""
    InboxMessage.objects.using(alias).filter(
        handler=row.handler, topic=row.topic, biz_id=row.biz_id, state=State.RECEIVED, attempts=0
    ).update(next_attempt_at=DatabaseTime())
