"""Runs under a lease: outside any transaction, while the lease is extended.

The lease store refuses the outcome once the lease has ended. So a message has one owner at a time, its effect happens at least
once, and an owner whose lease has ended cannot overwrite the outcome of the next owner.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from exactly_once.failures import NEVER_ENDED
from exactly_once.process.logs import escaping_logger
from exactly_once.sql.connections import is_inside_a_transaction
from exactly_once.wire.body import Undecodable
from inbox.conf import InboxOptions
from inbox.errors import LeaseLost
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.leases import renewal
from inbox.leases.steps import Steps
from inbox.leases.stores import Lease, renew, store_as_owner
from inbox.receiving.in_hand import lost_sessions
from inbox.receiving.outages import make_refunds, record_loss, refund_later
from inbox.receiving.outcomes import announce, failure_of, most_attempts_of
from inbox.receiving.reading import message_for, why_undecodable
from inbox.states import Outcome
from inbox.store import claims
from inbox.store.message_rows import Failure
from inbox.transactions.arrival import Arrival
from inbox.transactions.running import DatabaseUnavailable, call, outage_in
from inbox.transactions.sessions import SessionChanges, autocommit

logger = escaping_logger(__name__)


def run_leased(
    lease: Lease,
    options: InboxOptions,
    settle_success: Callable[[Handler, Sequence[Message]], object],
    take: Callable[[], Arrival | None] | None = None,
) -> Outcome:
    """Run a message under its lease.

    Args:
        take: returns the next message, which may get its lease in the commit that consumes this one.

    Raises:
        DatabaseUnavailable: the database or the lease store does not answer.
    """
    arrival, store, steps = lease.arrival, lease.store, Steps(lease)
    handler, stored, alias = arrival.handler, arrival.stored, arrival.handler.using
    with renewal.extending(lease):
        ended = _attempt(lease, options, steps)
        lease.settling = True
        settled = False
        try:
            if isinstance(ended, Failure):
                settled = not lease.lost and store_as_owner(lease, "its outcome", store.free, ended)
            else:
                following = take() if take is not None and not lease.lost else None
                settled = not lease.lost and store_as_owner(lease, "its outcome", store.consume, following)
            if not settled and renew(lease):
                again = partial(store.free, failure=ended) if isinstance(ended, Failure) else store.consume
                settled = store_as_owner(lease, "its outcome", again)
        finally:
            if lease.interrupted and stored is not None and not settled and not lost_sessions.count_against(arrival.row):
                refund_later(alias, claims.give_back, stored)
    if not settled:
        make_refunds(alias)
        logger.error(
            "%s: its lease ended before its run, so its outcome was not stored and it may run again. Make the duration and the "
            "limit of its Lease longer than its longest run.",
            lease,
        )
        store.leave(lease)
        return Outcome.STORED
    if isinstance(ended, Message):
        settle_success(handler, [ended])
        return Outcome.HANDLED
    if steps.in_doubt:
        # After the message was dead-lettered: it runs again only if an operator retries it.
        store_as_owner(lease, "its outcome", store.forget, steps.in_doubt)
    return announce(alias, arrival.row, ended)


def _attempt(lease: Lease, options: InboxOptions, steps: Steps) -> Message | Failure:
    """Run the handler; returns its argument, or its failure. The argument is read now, because the lease counts the attempt."""
    handler, arrival = lease.arrival.handler, lease.arrival
    made = lease.attempt - 1
    if made and made >= most_attempts_of(arrival, made, options):
        return Failure(
            error=f"Its attempts never ended: {handler.kind.never_ended}.",
            error_class=NEVER_ENDED,
            retry_after=None,
            attempts=made,
        )
    if is_inside_a_transaction(handler.using):
        raise RuntimeError(f"{handler.name} runs under a lease and must be called outside a transaction; one is open.")
    try:
        message = arrival.message or message_for(arrival, options)
    except Undecodable as error:
        return Failure(error=why_undecodable(error), retry_after=None, attempts=lease.attempt - 1)
    message = replace(message, attempt=lease.attempt, redelivered=lease.attempt > 1, fence=lease.fence, _steps=steps)
    changes = SessionChanges()
    try:
        with changes, autocommit(handler.using):
            call(handler, [(message, arrival.envelope)])
    # No signal arrives where handlers run, so even KeyboardInterrupt comes from the handler.
    except BaseException as error:  # noqa: BLE001
        if outage := outage_in(error, handler.using):
            outage.__cause__ = error
            record_loss(handler, [arrival.row], outage)
            error = outage
        # The step may learn of the lost lease only once the database answers again.
        is_outage = isinstance(error, DatabaseUnavailable) or (lease.without_store and isinstance(error, LeaseLost))
        lease.interrupted = is_outage and not steps.interrupted
        return failure_of(arrival, steps.interrupted or error, lease.attempt, options, row=lease.pk)
    finally:
        changes.end_sessions()
    # The handler may have caught the interruption; the message must stop anyway.
    return failure_of(arrival, steps.interrupted, lease.attempt, options) if steps.interrupted else message
