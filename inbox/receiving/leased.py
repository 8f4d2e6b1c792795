"""One message under a lease: acquire, run, settle.

The handler runs outside any transaction, while its lease is extended. The lease store refuses its outcome once the lease has
ended. So a message has one owner at a time, its effect happens at least once, and an owner whose lease has ended cannot
overwrite the outcome of the next owner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

from exactly_once.failures import NEVER_ENDED
from exactly_once.sql.connections import drop_unusable_connections
from exactly_once.sql.faults import is_lost
from exactly_once.wire.envelope import Envelope
from exactly_once.wire.text import describe
from inbox.conf import InboxOptions
from inbox.errors import LeaseLost
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.leases.autocommit import autocommit, is_inside_a_transaction
from inbox.leases.heartbeat import heartbeat
from inbox.leases.opening import lease_store
from inbox.leases.steps import Steps
from inbox.leases.stores import (
    Consumed,
    Held,
    HistoryLost,
    Lease,
    LeaseRequest,
    LeaseStore,
    LeaseStoreUnavailable,
    RowDecides,
    store_as_owner,
    stored_row,
)
from inbox.models import InboxMessage, State
from inbox.receiving.outcomes import (
    Received,
    announce,
    announce_duplicate,
    defer_locked,
    duplicate,
    fail_stored,
    failure_of,
    handled,
    store_failure,
)
from inbox.receiving.reading import Arrival, message_of, messages_of
from inbox.store import leases
from inbox.store.arrivals import store_due
from inbox.store.claims import give_back
from inbox.store.dialect import is_reachable
from inbox.store.rows import ConcurrentDuplicate, DuplicateCause, Earlier, Failure, KeyBusy, NewRow, business_id
from inbox.transactions.handler_transaction import call
from inbox.transactions.persistence import DatabaseUnavailable, committed
from inbox.transactions.sessions import SessionChanges

logger = logging.getLogger(__name__)

_UNAVAILABLE_BACKOFF = timedelta(seconds=5)
"""Backoff of a stored message while the lease store is unavailable."""
_KEY_BUSY_BACKOFF = timedelta(seconds=0.5)
_NEVER_ENDED = "Its attempts never ended: the process died, or the lease store became unavailable."


def receive(
    handler: Handler,
    arrival: Arrival,
    options: InboxOptions,
    *,
    redelivered: bool,
    acknowledge: Callable[[], object] | None = None,
) -> Received:
    """Process one delivery to its outcome.

    If its lease is in the database, its row and body are stored there, so it is acknowledged before the run. With Redis, the
    broker has the only copy until the run has ended.

    Raises:
        DatabaseUnavailable, LeaseStoreUnavailable: the database or the lease store does not answer; the message was not run.
        ConcurrentDuplicate: another transaction is inserting its row.
    """
    row, envelope = arrival.row, arrival.envelope
    drop_unusable_connections()
    sent_at = envelope.created_at and max(envelope.created_at, envelope.deliver_at or envelope.created_at)
    request = LeaseRequest(handler=handler, row=row, redelivered=redelivered, sent_at=sent_at)
    store = lease_store(options)
    verdict = store.acquire(request, duplicate_timeout=options.DUPLICATE_TIMEOUT)
    if isinstance(verdict, Lease):
        return _run_delivered(store, verdict, arrival, options, acknowledge)
    if isinstance(verdict, HistoryLost):
        return store_failure(handler, row, _quarantined(verdict, attempts=0), options, redelivered=redelivered)
    if isinstance(verdict, Consumed) and verdict.counted:
        _announce_duplicate(handler, row, verdict.cause, conflicting=verdict.conflicting)
        return Received.DUPLICATE
    if isinstance(verdict, RowDecides) and committed(
        partial(store_due, handler.using, row, options.DUPLICATE_TIMEOUT), handler.using
    ):
        return Received.STORED
    if isinstance(verdict, Held) and _store_external(request, options, verdict):
        _announce_duplicate(handler, row, verdict.cause, conflicting=verdict.conflicting)
        return Received.STORED
    return duplicate(handler, row, redelivered=redelivered)


def run_stored(handler: Handler, stored: InboxMessage, envelope: Envelope, options: InboxOptions) -> Received:
    """Run a stored message whose attempt has been claimed.

    Raises:
        DatabaseUnavailable: the database does not answer.
    """
    row, store, alias = stored_row(stored), lease_store(options), handler.using
    message = message_of(envelope, options, needs_id=False, biz_id=business_id(stored.biz_id))
    request = LeaseRequest(handler=handler, row=row, stored=stored)
    refund = partial(give_back, alias, stored)
    try:
        verdict = store.acquire(request, duplicate_timeout=options.DUPLICATE_TIMEOUT)
    except (LeaseStoreUnavailable, KeyBusy) as busy:
        # No attempt was made, and other messages must not wait.
        backoff = _KEY_BUSY_BACKOFF
        if isinstance(busy, LeaseStoreUnavailable):
            backoff = _UNAVAILABLE_BACKOFF
            seconds = backoff.total_seconds()
            logger.warning("%s: message %s is deferred for %.0f s: %s", handler.name, stored.message_id, seconds, busy)
        committed(partial(refund, backoff), alias)
        return Received.STORED
    except ConcurrentDuplicate:
        return defer_locked(handler, stored)
    except DatabaseUnavailable as outage:
        outage.refund = refund
        raise
    if isinstance(verdict, Lease):
        return _run(store, verdict, message, envelope, options)
    if isinstance(verdict, HistoryLost):
        return fail_stored(handler, stored, _quarantined(verdict, attempts=stored.attempts - 1))
    if isinstance(verdict, Held):
        committed(partial(leases.defer_to_lease_end, alias, stored, verdict.remaining), alias)
        return Received.STORED
    if isinstance(verdict, Consumed):
        committed(partial(leases.finish_external, alias, row, request.order, uncounted=1), alias)
    return Received.DUPLICATE


def _run_delivered(
    store: LeaseStore, lease: Lease, arrival: Arrival, options: InboxOptions, acknowledge: Callable[[], object] | None
) -> Received:
    message = next(messages_of(arrival, options))
    if acknowledge is None or lease.pk is None:
        return _run(store, lease, message, arrival.envelope, options)
    acknowledge()
    try:
        return _run(store, lease, message, arrival.envelope, options)
    except DatabaseUnavailable as outage:
        # The broker does not deliver it again.
        logger.warning("%s: its outcome could not be stored; it runs again when its lease has ended: %s", lease, outage)
    except Exception:
        logger.exception("%s: unexpected error; it runs again when its lease has ended.", lease)
    return Received.STORED


def _run(store: LeaseStore, lease: Lease, message: Message, envelope: Envelope, options: InboxOptions) -> Received:
    handler, row, steps = lease.request.handler, lease.request.row, Steps(store, lease)
    message = replace(message, attempt=lease.attempt, redelivered=lease.attempt > 1, fence=lease.fence, _steps=steps)
    with heartbeat.extending(store, lease):
        failure = _attempt(lease, message, steps, envelope, options)
        lease.settling = True
        write = partial(store.consume, lease) if failure is None else partial(store.free, lease, failure)
        stored, alias = lease.request.stored, handler.using
        refund = partial(give_back, alias, stored) if stored is not None and lease.interrupted else None
        try:
            settled = not lease.lost and store_as_owner(lease, "its outcome", write)
            if refund is not None and not settled:
                committed(refund, alias)
        except DatabaseUnavailable as outage:
            outage.refund = refund
            raise
    if not settled:
        return _lease_ended(lease, options)
    if failure is None:
        return handled(handler, message)
    if steps.in_doubt:
        # After the message was dead-lettered: it runs again only if an operator retries it.
        store_as_owner(lease, "its outcome", partial(store.forget, lease, steps.in_doubt))
    return announce(handler, row.message_id, row.biz_id, failure)


def _attempt(lease: Lease, message: Message, steps: Steps, envelope: Envelope, options: InboxOptions) -> Failure | None:
    """Run the handler; returns its failure, or None."""
    handler = lease.request.handler
    if lease.attempt > handler.retry.over(options.retry).max_attempts:
        return Failure(error=_NEVER_ENDED, error_class=NEVER_ENDED, retry_after=None, attempts=lease.attempt - 1)
    if is_inside_a_transaction(handler.using):
        raise RuntimeError(f"{handler.name} runs under a lease and must be called outside a transaction; one is open.")
    changes = SessionChanges()
    try:
        with changes, autocommit(handler.using):
            call(handler, message, envelope)
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
    return failure_of(handler, steps.interrupted, lease.attempt, options) if steps.interrupted else None


def _lease_ended(lease: Lease, options: InboxOptions) -> Received:
    """The next owner decides. A row is stored, so that a runner checks the message if it has no owner."""
    logger.error(
        "%s: its lease ended before its run, so its outcome was not stored and it may run again. Make the duration and the "
        "limit of its Lease longer than its longest run.",
        lease,
    )
    if lease.pk is None:
        _store_external(lease.request, options, Held(timedelta(), lease.attempt), counting=False)
    return Received.STORED


def _store_external(request: LeaseRequest, options: InboxOptions, held: Held, *, counting: bool = True) -> bool:
    """Store a message that a runner checks when the lease of its owner ends; `counting` this delivery as its duplicate.

    False: it has a row.
    """
    store = partial(
        leases.store_external,
        request.handler.using,
        request.row,
        options.DUPLICATE_TIMEOUT,
        until=held.remaining,
        attempts=held.attempts,
        duplicate=held.cause if counting else None,
        conflicting=held.conflicting,
        stopping=held.stopping,
    )
    return committed(store, request.handler.using)


def _announce_duplicate(handler: Handler, row: NewRow, cause: DuplicateCause, *, conflicting: bool) -> None:
    announce_duplicate(handler, row, Earlier(0, State.DONE, cause, conflicting=conflicting, abandoned=False))


def _quarantined(verdict: HistoryLost, *, attempts: int) -> Failure:
    return Failure(error=verdict.reason, retry_after=None, attempts=attempts, quarantined=True)
