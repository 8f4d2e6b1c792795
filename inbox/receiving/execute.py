"""Deliveries and claimed messages, each from its beginning to its outcome.

*Fast path*, for fresh deliveries: they are handled in one transaction (`run`); then the caller acknowledges. *Careful path*,
for a delivery that the broker has made before: store it first, so that the attempt is counted in its own commit before the
handler runs; a message that kills its process then runs out of attempts. Failed messages are also stored and acknowledged:
their retries are visible in the database.

Every delivery ends as one of `Outcome`. Only DEFERRED and UNSTORED are not acknowledged, and are processed again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial

from django.db import DatabaseError

from exactly_once.sql.faults import is_collision
from exactly_once.wire.body import Undecodable
from exactly_once.wire.envelope import Envelope
from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.models import InboxMessage
from inbox.outcome import Outcome
from inbox.receiving import leased
from inbox.receiving.admit import admit
from inbox.receiving.crash_quarantine import is_quarantined, quarantine
from inbox.receiving.in_hand import in_hand
from inbox.receiving.outcomes import fail_exhausted, fail_stored, failure_of
from inbox.receiving.parking import admit_again, admit_parked
from inbox.receiving.reading import (
    Arrival,
    Unidentifiable,
    identify_late,
    is_parked,
    message_of,
    read_body,
    stored_envelope,
    why_undecodable,
)
from inbox.receiving.run import Policy, run_claimed, run_fresh
from inbox.states import State
from inbox.store import claims, statistics
from inbox.store.dialect import is_reachable
from inbox.store.rows import UNIDENTIFIED, ConcurrentDuplicate, Failure, Successor, business_id
from inbox.transactions.persistence import DatabaseUnavailable, committed

logger = logging.getLogger(__name__)

_UNAVAILABLE_BACKOFF = timedelta(seconds=5)


def receive(
    handler: Handler, arrival: Arrival, options: InboxOptions, *, acknowledge: Callable[[], object] | None = None
) -> Outcome:
    """Process one delivery to its outcome.

    Args:
        acknowledge: called if the delivery may be acknowledged before the handler runs: under a lease in the database, its row
            and body are committed, and the run may take longer than the broker waits for an acknowledgement.

    Raises:
        DatabaseUnavailable: the database does not answer; nothing was decided.
    """
    if arrival.refused or handler.pulled:
        return admit(handler, [arrival], options)[0]
    if handler.lease:
        try:
            return leased.receive(handler, arrival, options, acknowledge=acknowledge)
        except ConcurrentDuplicate:
            in_hand.remember_elsewhere(arrival.row, options.DUPLICATE_TIMEOUT)
            return Outcome.DEFERRED
    return (receive_together(handler, [arrival], options) or [Outcome.DEFERRED])[0]


def receive_together(handler: Handler, arrivals: Sequence[Arrival], options: InboxOptions) -> list[Outcome] | None:
    """Process deliveries, none of them refused, in one transaction; returns the outcome of each, in their order.

    None: several have failed together, without any effect, and are to be run in smaller parts; or the single one is being
    handled elsewhere.

    Raises:
        DatabaseUnavailable: the database does not answer; nothing was decided.
    """
    rows = [arrival.row for arrival in arrivals]
    with in_hand.holding(rows) as free:
        if not free or any(map(in_hand.is_elsewhere, rows)):
            return None
        if rows[0].redelivered:
            return [_receive_carefully(handler, arrival, options) for arrival in arrivals]
        try:
            return run_fresh(Policy(handler, options), arrivals)
        except ConcurrentDuplicate:
            in_hand.remember_elsewhere(rows[0], options.DUPLICATE_TIMEOUT)
            return None


def claim_next(handlers: Sequence[Handler], alias: str, options: InboxOptions) -> tuple[Handler, InboxMessage] | None:
    """Claim one stored message that is due on `alias` and count its attempt; None if there is none.

    Raises:
        DatabaseUnavailable: the database does not answer.
    """
    known = {handler.name: handler for handler in handlers if handler.using == alias}
    stored: InboxMessage | None = None
    quarantined = quarantine.take(options.REDELIVERY_AFTER)

    def claim() -> InboxMessage | None:
        try:
            return claims.claim_due(alias, list(known), options.REDELIVERY_AFTER, quarantined=quarantined)
        except DatabaseError as error:
            if is_collision(error):
                return None
            raise

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
    finally:
        quarantine.leave()
    if outcome is Outcome.HANDLED:
        statistics.time_stored_effect(handler.using, handler.name, stored.received_at)
    return outcome


def _run_claimed(handler: Handler, stored: InboxMessage, options: InboxOptions, successor: Successor | None) -> Outcome:
    try:
        envelope = open_claimed(handler, stored, options)
    except Unidentifiable as error:
        return fail_stored(handler, stored, failure_of(handler, error.__cause__ or error, stored.attempts, options))
    except DatabaseUnavailable as outage:
        outage.refund = partial(claims.give_back, handler.using, stored, _UNAVAILABLE_BACKOFF)
        if outage.refused or not is_reachable(handler.using):
            raise
        # It is the database that the handler's `biz_id` queries, and other messages must not wait.
        committed(outage.refund, handler.using)
        logger.warning("%s: message %s is deferred: %s", handler.name, stored.message_id, outage)
        return Outcome.STORED
    if isinstance(envelope, Outcome):
        return envelope
    with in_hand.running(stored):
        if handler.lease:
            return leased.run_stored(handler, stored, envelope, options)
        messages = _stored_messages(stored, envelope, options)
        return run_claimed(Policy(handler, options), stored, envelope, messages, successor)


def open_claimed(handler: Handler, stored: InboxMessage, options: InboxOptions) -> Envelope | Outcome:
    """The content of a claimed message that can be run; the outcome of one that cannot.

    It cannot be run if its attempts are used up, it is parked, it cannot be read, or its message has another row.

    Raises:
        DatabaseUnavailable: the database does not answer.
    """
    if exhausted := fail_exhausted(handler, stored, options):
        return exhausted
    if is_parked(stored.biz_id):
        return admit_parked(handler, stored, options)
    envelope = stored_envelope(stored)
    try:
        biz_id = identify_late(handler, message_of(envelope, options, needs_id=False), stored)
    except Undecodable as error:
        return _refuse(handler, stored, envelope, why_undecodable(error), options)
    if biz_id != stored.biz_id:
        ours = committed(lambda: claims.rekey(handler.using, stored, biz_id), handler.using)
        if ours is False:
            reason = f"its biz-id is {biz_id}, which another message already has"
            committed(lambda: claims.skip_duplicate(handler.using, stored, reason), handler.using)
        if not ours:
            return Outcome.DUPLICATE
    stored.biz_id = biz_id
    return envelope


def _refuse(handler: Handler, stored: InboxMessage, envelope: Envelope, why: str, options: InboxOptions) -> Outcome:
    """Dead-letter a message that cannot be read."""
    # If it was stored unread, its biz-id comes from its headers. An unreadable message must not block that biz-id.
    unread = stored.state == State.RECEIVED and stored.attempts == 1 and not stored.ordered and stored.replaces_id is None
    if unread and not stored.biz_id.startswith(UNIDENTIFIED):
        return admit_again(handler, stored, read_body(handler, envelope, options, refused=why, redelivered=True), options)
    return fail_stored(handler, stored, Failure(error=why, retry_after=None, attempts=stored.attempts))


def _stored_messages(stored: InboxMessage, envelope: Envelope, options: InboxOptions) -> Iterator[Message]:
    biz_id = business_id(stored.biz_id)
    while True:
        yield message_of(envelope, options, needs_id=False, attempt=stored.attempts, biz_id=biz_id)


def _receive_carefully(handler: Handler, arrival: Arrival, options: InboxOptions) -> Outcome:
    (became,) = admit(handler, [arrival], options)
    if became is not Outcome.STORED:
        return became
    claimed = claim_next([handler], handler.using, options)
    return run_stored(*claimed, options) if claimed else became
