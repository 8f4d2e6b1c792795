"""One message under a lease: acquire, run, settle.

The handler runs outside any transaction, while its lease is extended. Its outcome is written by a statement that the store
refuses once the lease has ended. So a message has one owner at a time, its effect happens at least once, and an owner whose
lease has expired cannot overwrite its successor's outcome.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.leases.autocommit import autocommit, is_inside_a_transaction
from inbox.leases.heartbeat import heartbeat
from inbox.leases.opening import lease_store
from inbox.leases.steps import Steps
from inbox.leases.stores import Consumed, Forgotten, Held, Kept, Lease, LeaseStore, LeaseStoreUnavailable, Wanted, stored_row
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
from inbox.store.rows import ConcurrentDuplicate, DuplicateCause, Earlier, Failure, KeyBusy, NewRow, business_id
from inbox.transactions.handler_transaction import call
from inbox.transactions.persistence import DatabaseUnavailable, committed
from inbox.transactions.sessions import SessionChanges
from outbox.database.connections import drop_unusable_connections
from outbox.kernel.envelope import Envelope
from outbox.kernel.failures import NEVER_ENDED
from outbox.kernel.retry import Pause

logger = logging.getLogger(__name__)

_UNAVAILABLE_BACKOFF = timedelta(seconds=5)
"""Backoff of a stored message while the lease store is unavailable."""
_KEY_BUSY_BACKOFF = timedelta(seconds=0.5)
_NEVER_ENDED = "Its attempts never ended: its process died, or the store of its lease became unavailable."


def receive(
    handler: Handler,
    arrival: Arrival,
    options: InboxOptions,
    *,
    redelivered: bool,
    acknowledge: Callable[[], object] | None = None,
) -> Received:
    """Process a delivery that may be run to its outcome.

    It is acknowledged before the run if its lease is in the database, because its row and body are there, too. With Redis,
    the broker's copy is the only one until the run has ended.

    Raises:
        DatabaseUnavailable, LeaseStoreUnavailable: the database or the lease store does not answer; nothing was run.
        ConcurrentDuplicate: another transaction is inserting its row.
    """
    row, envelope = arrival.row, arrival.envelope
    drop_unusable_connections()
    sent_at = envelope.created_at and max(envelope.created_at, envelope.deliver_at or envelope.created_at)
    wanted = Wanted(handler=handler, row=row, redelivered=redelivered, sent_at=sent_at)
    store = lease_store(options)
    verdict = store.acquire(wanted, duplicate_timeout=options.DUPLICATE_TIMEOUT)
    if isinstance(verdict, Lease):
        return _run_delivered(store, verdict, arrival, options, acknowledge)
    if isinstance(verdict, Forgotten):
        return store_failure(handler, row, _quarantined(verdict, attempts=0), options, redelivered=redelivered)
    if isinstance(verdict, Consumed) and verdict.counted:
        _announce_duplicate(handler, row, verdict.cause, conflicting=verdict.conflicting)
        return Received.DUPLICATE
    if isinstance(verdict, Kept) and committed(
        partial(store_due, handler.using, row, options.DUPLICATE_TIMEOUT), handler.using
    ):
        return Received.STORED
    if isinstance(verdict, Held) and _keep(wanted, options, verdict):
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
    wanted = Wanted(handler=handler, row=row, stored=stored)
    give_it_back = partial(give_back, alias, stored.pk, stored.attempts)
    try:
        verdict = store.acquire(wanted, duplicate_timeout=options.DUPLICATE_TIMEOUT)
    except (LeaseStoreUnavailable, KeyBusy) as busy:
        # No attempt was made, and other messages must not wait.
        rest = _KEY_BUSY_BACKOFF
        if isinstance(busy, LeaseStoreUnavailable):
            rest = _UNAVAILABLE_BACKOFF
            logger.warning("%s: message %s is not run now: %s", handler.name, stored.message_id, busy)
        committed(partial(give_it_back, rest), alias)
        return Received.STORED
    except ConcurrentDuplicate:
        return defer_locked(handler, stored)
    except DatabaseUnavailable as outage:
        outage.refund = give_it_back
        raise
    if isinstance(verdict, Lease):
        return _run(store, verdict, message, envelope, options)
    if isinstance(verdict, Forgotten):
        return fail_stored(handler, stored, _quarantined(verdict, attempts=stored.attempts - 1))
    if isinstance(verdict, Held):
        committed(partial(leases.wait_for, alias, stored.pk, stored.attempts, verdict.remaining), alias)
        return Received.STORED
    if isinstance(verdict, Consumed):
        committed(partial(leases.finish_kept, alias, row, wanted.order, uncounted=1), alias)
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
        logger.warning("%s: its outcome cannot be stored, so it is run again when its lease has ended: %s", lease, outage)
    except Exception:
        logger.exception("%s: an unexpected error; it is run again when its lease has ended.", lease)
    return Received.STORED


def _run(store: LeaseStore, lease: Lease, message: Message, envelope: Envelope, options: InboxOptions) -> Received:
    handler, row, steps = lease.wanted.handler, lease.wanted.row, Steps(store, lease)
    message = replace(message, attempt=lease.attempt, redelivered=lease.attempt > 1, fence=lease.fence, _steps=steps)
    with heartbeat.keeping(store, lease):
        failure = _attempt(lease, message, steps, envelope, options)
        lease.settling = True
        write = partial(store.consume, lease) if failure is None else partial(store.free, lease, failure)
        settled = not lease.lost and _settle(lease, write)
    if not settled:
        return _overtaken(lease, options)
    if failure is None:
        return handled(handler, message)
    if steps.in_doubt:
        # Only now: the message is dead, so it runs again only if an operator decides so.
        _settle(lease, partial(store.forget, lease, steps.in_doubt))
    return announce(handler, row.message_id, row.biz_id, failure)


def _attempt(lease: Lease, message: Message, steps: Steps, envelope: Envelope, options: InboxOptions) -> Failure | None:
    """Run the handler; returns its failure, or None."""
    handler = lease.wanted.handler
    if lease.attempt > handler.retry.over(options.retry).max_attempts:
        return Failure(error=_NEVER_ENDED, error_class=NEVER_ENDED, retry_after=None, attempts=lease.attempt - 1)
    if is_inside_a_transaction(handler.using):
        raise RuntimeError(f"{handler.name} runs under a lease, outside transactions, but is called inside one.")
    changes = SessionChanges()
    try:
        with changes, autocommit(handler.using):
            call(handler, message, envelope)
    # No signal arrives where handlers run, so even KeyboardInterrupt comes from the handler.
    except BaseException as error:  # noqa: BLE001
        return failure_of(handler, steps.interrupted or error, lease.attempt, options, row=lease.pk)
    finally:
        changes.end_sessions()
    # The handler may have caught the interruption; the message must stop anyway.
    return failure_of(handler, steps.interrupted, lease.attempt, options) if steps.interrupted else None


def _settle(lease: Lease, write: Callable[[], bool | None]) -> bool:
    """Store the outcome; while the store is unavailable, retry for as long as the lease can still be ours.

    Raises:
        DatabaseUnavailable: the store was unavailable for longer.
    """
    pause = Pause()
    while True:
        try:
            return write() is not False
        except DatabaseUnavailable as outage:
            if lease.is_over:
                raise
            logger.warning("%s: it has been run, and that cannot be written down yet: %s", lease, outage)
            time.sleep(pause.next_seconds())


def _overtaken(lease: Lease, options: InboxOptions) -> Received:
    """The new owner decides. A row is stored, so that a runner checks the message if it has no owner."""
    logger.error(
        "%s: its run has ended, but its lease had ended before, so nothing was settled and it may be run again. Make the "
        "duration and the limit of its Lease longer than its longest run.",
        lease,
    )
    if lease.pk is None:
        _keep(lease.wanted, options, Held(timedelta(), lease.attempt), counting=False)
    return Received.STORED


def _keep(wanted: Wanted, options: InboxOptions, held: Held, *, counting: bool = True) -> bool:
    """Store a message to be checked when its owner's lease ends; `counting` this delivery as its duplicate.

    False: the database has a row of it.
    """
    keep = partial(
        leases.keep,
        wanted.handler.using,
        wanted.row,
        options.DUPLICATE_TIMEOUT,
        until=held.remaining,
        attempts=held.attempts,
        duplicate=held.cause if counting else None,
        conflicting=held.conflicting,
    )
    return committed(keep, wanted.handler.using)


def _announce_duplicate(handler: Handler, row: NewRow, cause: DuplicateCause, *, conflicting: bool) -> None:
    announce_duplicate(handler, row, Earlier(0, State.DONE, cause, conflicting=conflicting, abandoned=False))


def _quarantined(verdict: Forgotten, *, attempts: int) -> Failure:
    return Failure(error=verdict.reason, retry_after=None, attempts=attempts, quarantined=True)
