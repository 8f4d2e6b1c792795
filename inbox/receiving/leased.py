"""One message under a lease: acquire, run, settle.

The handler runs outside any transaction, while its lease is extended. The lease store refuses its outcome once the lease has
ended. So a message has one owner at a time, its effect happens at least once, and an owner whose lease has ended cannot
overwrite the outcome of the next owner.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from exactly_once.failures import NEVER_ENDED
from exactly_once.sql.connections import drop_unusable_connections
from exactly_once.sql.faults import is_lost
from exactly_once.wire.body import Undecodable
from exactly_once.wire.text import describe
from inbox.conf import InboxOptions
from inbox.errors import LeaseLost
from inbox.handlers.message import Message
from inbox.leases import heartbeat
from inbox.leases.steps import Steps
from inbox.leases.stores import Lease, lease_store, store_as_owner
from inbox.outcome import Outcome
from inbox.receiving.admit import admit
from inbox.receiving.outages import refund_later
from inbox.receiving.outcomes import announce, failure_of, handled
from inbox.receiving.reading import message_for, why_undecodable
from inbox.store.claims import give_back
from inbox.store.dialect import is_reachable
from inbox.store.rows import Failure
from inbox.transactions.handler_transaction import Arrival, call
from inbox.transactions.persistence import DatabaseUnavailable, committed
from inbox.transactions.sessions import SessionChanges, autocommit, is_inside_a_transaction

logger = logging.getLogger(__name__)

_NEVER_ENDED = "Its attempts never ended: the process died, or the lease store became unavailable."


def receive(arrival: Arrival, options: InboxOptions, *, acknowledge: Callable[[], object] | None = None) -> Outcome:
    """Process one delivery to its outcome.

    If its lease is in the database, its row and body are stored there, so it is acknowledged before the run. With Redis, the
    broker has the only copy until the run has ended.

    Raises:
        DatabaseUnavailable, LeaseStoreUnavailable: the database or the lease store does not answer; the message was not run.
        ConcurrentDuplicate: another transaction is inserting its row.
    """
    drop_unusable_connections()
    lease = lease_store(options).acquire(arrival)
    if not isinstance(lease, Lease):
        return lease or admit(arrival.handler, [arrival], options)[0]
    if acknowledge is None or lease.pk is None:
        return run(lease, options)
    acknowledge()
    try:
        return run(lease, options)
    except DatabaseUnavailable as outage:
        # The broker does not deliver it again.
        logger.warning("%s: its outcome could not be stored; it runs again when its lease has ended: %s", lease, outage)
    except Exception:
        logger.exception("%s: unexpected error; it runs again when its lease has ended.", lease)
    return Outcome.STORED


def run(lease: Lease, options: InboxOptions) -> Outcome:
    """Run a message under its lease.

    Raises:
        DatabaseUnavailable: the database or the lease store does not answer.
    """
    arrival, store, steps = lease.arrival, lease.store, Steps(lease)
    handler, stored, alias = arrival.handler, arrival.stored, arrival.handler.using
    with heartbeat.extending(lease):
        ended = _attempt(lease, options, steps)
        lease.settling = True
        write = partial(store.free, lease, ended) if isinstance(ended, Failure) else partial(store.consume, lease)
        refund = partial(give_back, alias, stored) if stored is not None and lease.interrupted else None
        try:
            settled = not lease.lost and store_as_owner(lease, "its outcome", write)
            if refund is not None and not settled:
                committed(refund, alias)
        except DatabaseUnavailable:
            if refund is not None:
                refund_later(alias, refund)
            raise
    if not settled:
        logger.error(
            "%s: its lease ended before its run, so its outcome was not stored and it may run again. Make the duration and the "
            "limit of its Lease longer than its longest run.",
            lease,
        )
        store.leave(lease)
        return Outcome.STORED
    if isinstance(ended, Message):
        handled(handler, [ended])
        return Outcome.HANDLED
    if steps.in_doubt:
        # After the message was dead-lettered: it runs again only if an operator retries it.
        store_as_owner(lease, "its outcome", partial(store.forget, lease, steps.in_doubt))
    return announce(alias, arrival.row, ended)


def _attempt(lease: Lease, options: InboxOptions, steps: Steps) -> Message | Failure:
    """Run the handler; returns its argument, or its failure. The argument is read now, because the lease counts the attempt."""
    handler, arrival = lease.arrival.handler, lease.arrival
    if lease.attempt > handler.retry.most_attempts(options.retry):
        return Failure(error=_NEVER_ENDED, error_class=NEVER_ENDED, retry_after=None, attempts=lease.attempt - 1)
    if is_inside_a_transaction(handler.using):
        raise RuntimeError(f"{handler.name} runs under a lease and must be called outside a transaction; one is open.")
    try:
        message = arrival.message or message_for(arrival, options)
    except Undecodable as error:
        return Failure(error=why_undecodable(error), retry_after=None, attempts=lease.attempt)
    message = replace(message, attempt=lease.attempt, redelivered=lease.attempt > 1, fence=lease.fence, _steps=steps)
    changes = SessionChanges()
    try:
        with changes, autocommit(handler.using):
            call(handler, [(message, arrival.envelope)])
    # No signal arrives where handlers run, so even KeyboardInterrupt comes from the handler.
    except BaseException as error:  # noqa: BLE001
        if is_lost(error) and not is_reachable(handler.using):
            error = DatabaseUnavailable(describe(error))
        # The step may learn of the lost lease only once the database answers again.
        is_outage = isinstance(error, DatabaseUnavailable) or (lease.without_store and isinstance(error, LeaseLost))
        lease.interrupted = is_outage and not steps.interrupted
        return failure_of(handler, steps.interrupted or error, lease.attempt, options, row=lease.pk)
    finally:
        changes.end_sessions()
    # The handler may have caught the interruption; the message must stop anyway.
    return failure_of(handler, steps.interrupted, lease.attempt, options) if steps.interrupted else message
