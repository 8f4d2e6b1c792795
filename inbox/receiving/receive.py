"""Deliveries, each from its beginning to its outcome.

*Fast path*, for fresh deliveries: one `run`, which inserts their rows in the handler's transaction.

*Careful path*, for a delivery that the broker has made before: store it first, so that the attempt is counted in its own commit
before the handler runs; a message that kills its process then runs out of attempts. Failed messages are also stored and
acknowledged: their retries are visible in the database.

Every delivery ends as one of `Outcome`. Only DEFERRED and UNSTORED are not acknowledged, and are processed again.
"""

from collections.abc import Callable, Sequence

from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler
from inbox.outcome import Outcome
from inbox.receiving import leased
from inbox.receiving.admit import admit
from inbox.receiving.claimed import claim_next, run_stored
from inbox.receiving.in_hand import in_hand
from inbox.receiving.reading import is_parked
from inbox.receiving.run import Policy, run
from inbox.store.rows import ConcurrentDuplicate
from inbox.transactions.handler_transaction import Arrival


def receive(
    handler: Handler,
    arrivals: Sequence[Arrival],
    options: InboxOptions,
    *,
    acknowledge: Callable[[], object] | None = None,
) -> list[Outcome] | None:
    """Process deliveries to their outcomes; returns them in their order.

    None: several have failed together, without any effect, and are to be run in smaller parts.

    Args:
        arrivals: one that is refused, unread, redelivered or leased is given alone.
        acknowledge: called if the delivery may be acknowledged before the handler runs: under a lease in the database, its row
            and body are committed, and the run may take longer than the broker waits for an acknowledgement.

    Raises:
        DatabaseUnavailable: the database does not answer; nothing was decided.
    """
    first = arrivals[0]
    if first.refused or handler.pulled:
        return admit(handler, arrivals, options)
    held = None
    try:
        if handler.lease and not (first.unread and is_parked(first.row.biz_id)):
            return [leased.receive(first, options, acknowledge=acknowledge)]
        if (held := in_hand.take([arrival.row for arrival in arrivals])) is not None:
            if first.unread or first.row.redelivered:
                return [_receive_carefully(handler, first, options)]
            return run(Policy(handler, options), arrivals)
    except ConcurrentDuplicate:
        in_hand.remember_elsewhere(first.row, options.DUPLICATE_TIMEOUT)
    finally:
        if held:
            in_hand.end(held)
    return [Outcome.DEFERRED] if len(arrivals) == 1 else None


def _receive_carefully(handler: Handler, arrival: Arrival, options: InboxOptions) -> Outcome:
    (became,) = admit(handler, [arrival], options)
    if became is not Outcome.STORED:
        return became
    claimed = claim_next([handler], handler.using, options)
    return run_stored(*claimed, options) if claimed else became
