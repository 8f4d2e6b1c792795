"""A delivery that waits for a token of its handler's rate limit, for too long to stay unacknowledged.

A broker takes a consumer that does not answer for dead (RabbitMQ after thirty minutes, `consumer_timeout`) and ends the
channel with all other deliveries on it. Giving this one back would have it delivered again at once, round and round. So it is
stored like a retry and acknowledged; the runner handles it when its turn comes, under the same limit.
"""

from __future__ import annotations

from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler
from inbox.receiving.outcomes import Received, duplicate
from inbox.receiving.reading import Arrival
from inbox.store import arrivals
from inbox.store.rows import TwinBusy
from inbox.transactions.persistence import decided


def store_for_later(handler: Handler, arrival: Arrival, options: InboxOptions, *, redelivered: bool) -> Received:
    """Store a delivery that is not refused, to be run when its handler's rate allows; STORED, or what came before it.

    Raises:
        DatabaseAway: the database does not answer; nothing was decided.
    """
    try:
        if decided(lambda: arrivals.store_due(handler.using, arrival.row, options.TWIN_TIMEOUT), handler.using):
            return Received.STORED
    except TwinBusy:
        return Received.PUT_OFF
    return duplicate(handler, arrival.row, redelivered=redelivered)
