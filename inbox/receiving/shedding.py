"""Storing deliveries that load shedding drops."""

from __future__ import annotations

from collections.abc import Sequence

from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler
from inbox.limits.shedder import shedder_of
from inbox.receiving.outcomes import Received, duplicate, shed
from inbox.receiving.reading import Arrival
from inbox.receiving.single import receive
from inbox.store.rows import NewRow, TwinBusy
from inbox.store.shedding import store_shed
from inbox.transactions.persistence import decided


def receive_shed(
    handler: Handler, deliveries: Sequence[tuple[Arrival, bool]], reason: str, options: InboxOptions
) -> list[Received]:
    """Write deliveries down as shed instead of handling them; what became of each, in their order.

    With each comes whether the broker has delivered it before.

    A duplicate among them is counted as one, a refused one is a dead letter, and one that a twin has in hand is put off.

    Raises:
        DatabaseAway: the database does not answer. Some may have been written down already; all may come again.
    """
    rows = [arrival.row for arrival, _ in deliveries if not arrival.refused]
    stored = _stored(handler, rows, reason, options) if rows else {}
    if (shedder := shedder_of(handler)) is not None:
        shedder.dropped(sum(became is Received.SHED for became in stored.values()))
    return [
        receive(handler, arrival, options, redelivered=redelivered)
        if arrival.refused
        else _told(handler, arrival.row, stored[id(arrival.row)], reason, redelivered=redelivered)
        for arrival, redelivered in deliveries
    ]


def _stored(handler: Handler, rows: Sequence[NewRow], reason: str, options: InboxOptions) -> dict[int, Received]:
    try:
        shed = decided(lambda: store_shed(handler.using, rows, reason, options.TWIN_TIMEOUT), handler.using)
    except TwinBusy:
        if len(rows) == 1:
            return {id(rows[0]): Received.PUT_OFF}
        return {found: became for row in rows for found, became in _stored(handler, [row], reason, options).items()}
    new = {id(row) for row in shed}
    return {id(row): Received.SHED if id(row) in new else Received.DUPLICATE for row in rows}


def _told(handler: Handler, row: NewRow, became: Received, reason: str, *, redelivered: bool) -> Received:
    if became is Received.SHED:
        return shed(handler, row, reason)
    return duplicate(handler, row, redelivered=redelivered) if became is Received.DUPLICATE else became
