"""Taking in what is delivered to an ordered handler: stored first, in the order of the queue, run later.

Handlers cannot be called in the order of a broker's queue: what fails comes back behind others, and two processes that share a
queue run side by side. So the deliveries of an ordered queue are only stored, by one consumer at a time, many in one
transaction, and acknowledged after the commit. From then on the order of a key is that of its rows, and any runner of any
process takes the head of any key, see `store.ordering`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from django.db import DatabaseError

from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler
from inbox.receiving.outcomes import Received, taken_in, unfit
from inbox.receiving.reading import Arrival
from inbox.store import intake, ordering, rows
from inbox.store.intake import Incoming, Taken
from inbox.store.rows import TwinBusy
from inbox.transactions.persistence import DatabaseAway, decided
from outbox.kernel.text import describe

logger = logging.getLogger(__name__)


def take_in(handler: Handler, deliveries: Sequence[tuple[Arrival, bool]], options: InboxOptions) -> list[Received]:
    """Store deliveries of one queue of an ordered handler, in their order; what became of each.

    Each comes with what the broker says: has it delivered this very message before? No other thread may take the same queue
    in meanwhile, and after an error these same deliveries must be taken in again before any later one of that queue.

    Raises:
        DatabaseAway: they could not be stored, for whatever reason; nothing was decided.
    """
    incoming = [
        Incoming(row=arrival.row, refused=arrival.refused, quarantined=arrival.quarantined, redelivered=again)
        for arrival, again in deliveries
    ]

    def write() -> list[Taken]:
        with ordering.deciding(handler.using, options.TWIN_TIMEOUT):
            return intake.take_in(handler.using, incoming, dead_blocks=handler.on_dead == "block")

    try:
        taken = decided(write, handler.using)
    except DatabaseAway:
        raise
    except TwinBusy as error:
        raise DatabaseAway(f"a transaction has had one of these messages in hand for over {options.TWIN_TIMEOUT}") from error
    except DatabaseError as error:
        if len(deliveries) > 1:
            # The values of one are to blame, and the others are not to wait for it.
            return [took for delivery in deliveries for took in take_in(handler, [delivery], options)]
        ((arrival, again),) = deliveries
        body_only = replace(arrival, row=rows.undecoded(arrival.row), refused=unfit(error))
        if arrival.refused == body_only.refused:
            raise DatabaseAway(f"a delivery cannot be stored, and nothing goes past it: {describe(error)}") from error
        return take_in(handler, [(body_only, again)], options)
    except Exception as error:
        # Whatever it is, it must be put right first.
        logger.exception("%s: %d deliveries cannot be stored, and nothing goes past them.", handler.name, len(incoming))
        raise DatabaseAway(f"its deliveries cannot be stored: {describe(error)}") from error
    return [taken_in(handler, arrival, one) for (arrival, _), one in zip(deliveries, taken, strict=True)]
