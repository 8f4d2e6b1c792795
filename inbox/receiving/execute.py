"""One message from its delivery, or from its claim, to its outcome.

*Fast path*, for a fresh delivery: it is handled in one transaction (`transactional`); then the caller acknowledges. *Careful
path*, for a delivery that the broker has made before: store it first, so that the attempt is
counted in its own commit before the handler runs; a message that kills its process then runs out of attempts. Failed messages
are also stored and acknowledged: their retries are visible in the database.

Every delivery ends as one of `Received`. Only DEFERRED and UNSTORED are not acknowledged, and are processed again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from functools import partial

from django.db import DatabaseError

from exactly_once.sql.faults import is_collision
from exactly_once.wire.body import Undecodable
from exactly_once.wire.envelope import Envelope
from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.models import InboxMessage, State
from inbox.receiving import leased
from inbox.receiving.admit import admit
from inbox.receiving.crash_quarantine import is_quarantined, quarantine
from inbox.receiving.in_hand import in_hand
from inbox.receiving.outcomes import Received, fail_exhausted, fail_stored, failure_of
from inbox.receiving.reading import (
    Arrival,
    Unidentifiable,
    identify_late,
    is_undecided,
    message_of,
    messages_of,
    read,
    stored_envelope,
    undecided_envelope,
    why_undecodable,
)
from inbox.receiving.refused_rows import RefusedMessages
from inbox.receiving.transactional import Policy, run_claimed, run_fresh
from inbox.receiving.undecided import decide
from inbox.store import claims, statistics
from inbox.store.dialect import is_reachable
from inbox.store.rows import UNIDENTIFIED, ConcurrentDuplicate, Failure, Follower, business_id
from inbox.transactions.persistence import DatabaseUnavailable, committed

logger = logging.getLogger(__name__)

_UNAVAILABLE_BACKOFF = timedelta(seconds=5)


def receive(
    handler: Handler,
    arrival: Arrival,
    options: InboxOptions,
    *,
    redelivered: bool,
    acknowledge: Callable[[], object] | None = None,
) -> Received:
    """Process one delivery to its outcome.

    Args:
        acknowledge: called if the delivery may be acknowledged before the handler runs: under a lease in the database, its row
            and body are committed, and the run may take longer than the broker waits for an acknowledgement.

    Raises:
        DatabaseUnavailable: the database does not answer; nothing was decided.
    """
    try:
        if arrival.refused or handler.pulled:
            return admit(handler, [(arrival, redelivered)], options)[0]
        if handler.lease:
            return leased.receive(handler, arrival, options, redelivered=redelivered, acknowledge=acknowledge)
        if in_hand.is_elsewhere(arrival.row):
            return Received.DEFERRED
        with in_hand.holding([arrival.row]) as free:
            if not free:
                return Received.DEFERRED
            return _receive_carefully(handler, arrival, options) if redelivered else _receive_fresh(handler, arrival, options)
    except ConcurrentDuplicate:
        in_hand.remember_elsewhere(arrival.row, options.DUPLICATE_TIMEOUT)
        return Received.DEFERRED


def claim_next(
    handlers: Sequence[Handler], alias: str, options: InboxOptions, refused: RefusedMessages | None = None
) -> tuple[Handler, InboxMessage] | None:
    """Claim one stored message that is due on `alias` and count its attempt; None if there is none.

    Args:
        refused: messages whose rows the database refuses to change; they are skipped, and another is claimed.

    Raises:
        DatabaseUnavailable: the database does not answer.
    """
    known = {handler.name: handler for handler in handlers if handler.using == alias}
    stored: InboxMessage | None = None
    quarantined = quarantine.take(options.REDELIVERY_AFTER)

    def claim_without(rows: Collection[int]) -> InboxMessage | None:
        return claims.claim_due(alias, list(known), options.REDELIVERY_AFTER, quarantined=quarantined, without=rows)

    def refused_row(rows: Collection[int]) -> int | None:
        return claims.refused_claim(alias, list(known), quarantined=quarantined, without=rows)

    def claim() -> InboxMessage | None:
        try:
            return refused.claim_another(claim_without, refused_row) if refused is not None else claim_without(())
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


def run_stored(handler: Handler, stored: InboxMessage, options: InboxOptions, follower: Follower | None = None) -> Received:
    """Run a stored message whose attempt has been claimed. If it is handled, `follower` has claimed the next message.

    Raises:
        DatabaseUnavailable: the database does not answer.
    """
    try:
        outcome = _run_claimed(handler, stored, options, follower)
    finally:
        quarantine.leave()
    if outcome is Received.HANDLED:
        statistics.time_stored_effect(handler.using, handler.name, stored.received_at)
    return outcome


def _run_claimed(handler: Handler, stored: InboxMessage, options: InboxOptions, follower: Follower | None) -> Received:
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
        return Received.STORED
    if isinstance(envelope, Received):
        return envelope
    with in_hand.running(stored):
        if handler.lease:
            return leased.run_stored(handler, stored, envelope, options)
        messages = _stored_messages(stored, envelope, options)
        return run_claimed(Policy(handler, options), stored, envelope, messages, follower)


def open_claimed(handler: Handler, stored: InboxMessage, options: InboxOptions) -> Envelope | Received:
    """The content of a claimed message that can be run; the outcome of one that cannot.

    It cannot be run if its attempts are used up, it cannot be read, or its message has another row.

    Raises:
        DatabaseUnavailable: the database does not answer.
    """
    if exhausted := fail_exhausted(handler, stored, options):
        return exhausted
    if is_undecided(stored.biz_id):
        ended = decide(handler, stored, read(handler, undecided_envelope(stored), options))
        if ended is not None:
            return ended
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
            return Received.DUPLICATE
    stored.biz_id = biz_id
    return envelope


def _refuse(handler: Handler, stored: InboxMessage, envelope: Envelope, why: str, options: InboxOptions) -> Received:
    """Dead-letter a message that cannot be read."""
    # If it was stored unread, its biz-id comes from its headers. An unreadable message must not block that biz-id.
    unread = stored.state == State.RECEIVED and stored.attempts == 1 and not stored.ordered and stored.replaces_id is None
    if unread and not stored.biz_id.startswith(UNIDENTIFIED):
        return decide(handler, stored, read(handler, envelope, options, refused=why)) or Received.DEAD
    return fail_stored(handler, stored, Failure(error=why, retry_after=None, attempts=stored.attempts))


def _stored_messages(stored: InboxMessage, envelope: Envelope, options: InboxOptions) -> Iterator[Message]:
    biz_id = business_id(stored.biz_id)
    while True:
        yield message_of(envelope, options, needs_id=False, attempt=stored.attempts, biz_id=biz_id)


def _receive_fresh(handler: Handler, arrival: Arrival, options: InboxOptions) -> Received:
    return run_fresh(Policy(handler, options), arrival, messages_of(arrival, options))


def _receive_carefully(handler: Handler, arrival: Arrival, options: InboxOptions) -> Received:
    (became,) = admit(handler, [(arrival, True)], options)
    if became is not Received.STORED:
        return became
    claimed = claim_next([handler], handler.using, options)
    return run_stored(*claimed, options) if claimed else became
