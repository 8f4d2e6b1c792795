"""Many deliveries that share one transaction, written by one statement."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from django.db import connections

from exactly_once.sql.connections import is_outermost, is_postgresql
from inbox.conf import inbox_options
from inbox.models import State
from inbox.store.inserting import Insertion, insert_many
from inbox.store.rows import Guard, NewRow, emptied
from inbox.store.sentinel import SAVEPOINT


def begin_together(alias: str, rows: Sequence[NewRow], duplicate_timeout: timedelta) -> tuple[Guard, list[NewRow]] | None:
    """∅ → done for many at once, as the first statement of their transaction: the guard, and those of `rows`, in their order,
    that are not duplicates of others or of each other. None: all are duplicates.

    Where `arrivals.begin_fresh` writes `received`, so does this.

    Raises:
        ConcurrentDuplicate: another transaction is inserting one of them and did not end within `duplicate_timeout`.
    """
    connection = connections[alias]
    state = State.DONE if is_postgresql(connection) and is_outermost(connection) else State.RECEIVED
    is_emptied = state is State.DONE and not inbox_options().keeps_all_bodies
    # In one order everywhere: two transactions that insert copies of the same messages must not deadlock.
    in_one_order = sorted(rows, key=lambda row: row.biz_id)
    attempts = int(state is State.DONE)
    insertions = [Insertion(row=emptied(row) if is_emptied else row, state=state, attempts=attempts) for row in in_one_order]
    inserted = insert_many(alias, insertions, duplicate_timeout, skip_existing=False)
    if not inserted.rows:
        return None
    if not is_postgresql(connection):
        with connection.cursor() as cursor:
            cursor.execute(f"SAVEPOINT {SAVEPOINT}")
    begun: dict[str, NewRow] = {}
    for row in rows:
        if row.biz_id in inserted.rows:
            begun.setdefault(row.biz_id, row)
    ours = tuple(begun.values())
    guard = Guard(
        alias,
        tuple(inserted.rows[biz_id][0] for biz_id in begun),
        inserted.transaction,
        is_settled=state is State.DONE,
        emptied=ours if is_emptied else (),
    )
    return guard, list(ours)
