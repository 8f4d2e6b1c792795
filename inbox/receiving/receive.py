"""Messages, each from its beginning to its outcome: deliveries, and stored messages whose attempt has been claimed.

*Fast path*, for fresh deliveries: one `run`, which inserts their rows in the handler's transaction.

*Careful path*, for a delivery that the broker has made before: store it first, so that the attempt is counted in its own commit
before the handler runs; a message that kills its process then runs out of attempts. Failed messages are also stored and
acknowledged: their retries are visible in the database.

*Stored messages* are retries, messages that were handed over, and those of the careful path. Each is claimed and read, and then
run as a fresh delivery is: see `run`, and `leased`.

Every delivery ends as one of `Outcome`. Only DEFERRED and UNSTORED are not acknowledged, and are processed again.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

from exactly_once.wire.body import Undecodable
from exactly_once.wire.envelope import Envelope
from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler
from inbox.leases.database import lease_store
from inbox.leases.stores import Lease
from inbox.models import InboxMessage
from inbox.outcome import Outcome
from inbox.receiving import leased
from inbox.receiving.admit import admit
from inbox.receiving.attempt_refunds import refunds
from inbox.receiving.crash_quarantine import is_quarantined, quarantine
from inbox.receiving.in_hand import in_hand
from inbox.receiving.outcomes import defer_locked, fail_exhausted, fail_stored, failure_of
from inbox.receiving.parking import identify_parked, identify_unread
from inbox.receiving.reading import (
    Unidentifiable,
    identify,
    is_parked,
    message_for,
    message_of,
    read_body,
    stored_arrival,
    why_undecodable,
)
from inbox.receiving.run import Policy, run
from inbox.states import State
from inbox.store import claims, statistics
from inbox.store.dialect import is_reachable
from inbox.store.rows import UNIDENTIFIED, ConcurrentDuplicate, Failure, KeyBusy, Successor
from inbox.transactions.handler_transaction import Arrival
from inbox.transactions.persistence import DatabaseUnavailable, committed

logger = logging.getLogger(__name__)

_UNAVAILABLE_BACKOFF = timedelta(seconds=5)
_KEY_BUSY_BACKOFF = timedelta(seconds=0.5)


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


def claim_next(handlers: Sequence[Handler], alias: str, options: InboxOptions) -> tuple[Handler, InboxMessage] | None:
    """Claim one stored message that is due on `alias` and count its attempt; None if there is none.

    Raises:
        DatabaseUnavailable: the database does not answer.
    """
    known = {handler.name: handler for handler in handlers if handler.using == alias}
    stored: InboxMessage | None = None
    quarantined = quarantine.take(options.REDELIVERY_AFTER)
    claim = partial(claims.claim_due, alias, list(known), options.REDELIVERY_AFTER, quarantined=quarantined)
    try:
        stored = committed(claim, alias)
    finally:
        if stored is None or not is_quarantined(stored):
            quarantine.leave()
    return (known[stored.handler], stored) if stored else None


def run_stored(handler: Handler, stored: InboxMessage, options: InboxOptions, successor: Successor | None = None) -> Outcome:
    """Run a stored message whose attempt has been claimed. If it is handled, `successor` has claimed the next message.

    Raises:
        DatabaseUnavailable: the database does not answer.
    """
    try:
        outcome = _run_claimed(handler, stored, options, successor)
    except KeyBusy:
        committed(partial(claims.give_back, handler.using, stored, _KEY_BUSY_BACKOFF), handler.using)
        return Outcome.STORED
    except ConcurrentDuplicate:
        return defer_locked(handler, stored)
    finally:
        quarantine.leave()
    if outcome is Outcome.HANDLED:
        statistics.time_stored_effect(handler.using, handler.name, stored.received_at)
    return outcome


def _run_claimed(handler: Handler, stored: InboxMessage, options: InboxOptions, successor: Successor | None) -> Outcome:
    lease: Lease | Outcome | None = None
    try:
        arrival = open_claimed(handler, stored, options)
        if handler.lease and isinstance(arrival, Arrival):
            lease = lease_store(options).acquire(arrival)
    except Unidentifiable as error:
        return fail_stored(handler, stored, failure_of(handler, error.__cause__ or error, stored.attempts, options))
    except DatabaseUnavailable as outage:
        refund = partial(claims.give_back, handler.using, stored, _UNAVAILABLE_BACKOFF)
        if outage.refused or not is_reachable(handler.using):
            refunds.add(handler.using, refund)
            raise
        # It is the lease store, or the database that the handler's `biz_id` queries, and other messages must not wait.
        committed(refund, handler.using)
        logger.warning("%s: message %s is deferred: %s", handler.name, stored.message_id, outage)
        return Outcome.STORED
    if isinstance(arrival, Outcome):
        return arrival
    with in_hand.running(stored):
        if not handler.lease:
            return (run(Policy(handler, options), [arrival], successor) or [Outcome.STORED])[0]
        return leased.run(lease, options) if isinstance(lease, Lease) else lease or Outcome.DUPLICATE


def open_claimed(handler: Handler, stored: InboxMessage, options: InboxOptions) -> Arrival | Outcome:
    """A claimed message that can be run; the outcome of one that cannot.

    It cannot be run if its attempts are used up, it cannot be read, or its message has another row or is being handled.

    Raises:
        DatabaseUnavailable: the database does not answer.
    """
    if exhausted := fail_exhausted(handler, stored, options):
        return exhausted
    if is_parked(stored.biz_id):
        return identify_parked(handler, stored, options)
    arrival = stored_arrival(handler, stored)
    try:
        if handler.biz_id is None or not stored.biz_id.startswith(UNIDENTIFIED):
            arrival.message = message_for(arrival, options)
            return arrival
        # It was stored without its biz-id, which may be found now.
        biz_id = identify(handler, message_of(arrival.envelope, options, needs_id=False))
    except Undecodable as error:
        return _refuse(handler, stored, arrival.envelope, why_undecodable(error), options)
    ours = committed(partial(claims.identify, handler.using, stored, {"biz_id": biz_id}), handler.using)
    if ours is False:
        reason = f"its biz-id is {biz_id}, which another message already has"
        committed(lambda: claims.skip_duplicate(handler.using, stored, reason), handler.using)
    return replace(arrival, row=replace(arrival.row, biz_id=biz_id)) if ours else Outcome.DUPLICATE


def _refuse(handler: Handler, stored: InboxMessage, envelope: Envelope, why: str, options: InboxOptions) -> Outcome:
    """Dead-letter a message that cannot be read."""
    # If it was stored unread, its biz-id comes from its headers. An unreadable message must not block that biz-id.
    unread = stored.state == State.RECEIVED and stored.attempts == 1 and not stored.ordered and stored.replaces_id is None
    if unread and not stored.biz_id.startswith(UNIDENTIFIED):
        arrival = read_body(handler, envelope, options, refused=why, redelivered=True)
        if (became := identify_unread(handler, stored, arrival)) is not None:
            return became
    return fail_stored(handler, stored, Failure(error=why, retry_after=None, attempts=stored.attempts))
