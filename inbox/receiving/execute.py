"""One delivery, one handler, one transaction: the exactly-once path.

*Fast path*, for a fresh delivery: insert the inbox row, call the handler, execute the commit sentinel, commit; then the
caller acknowledges. *Careful path*, for a delivery that the broker has made before: store it first, so that the attempt is
counted in its own commit before the handler runs; a message that kills its process then runs out of attempts. Failed messages
are also stored and acknowledged: retries wait in the database, where people can see them.

Every delivery ends as one of `Received`. Only DEFERRED and UNSTORED are not acknowledged; they are tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial

from django.db import DatabaseError

from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.models import InboxMessage, State
from inbox.receiving import leased
from inbox.receiving.admit import admit
from inbox.receiving.crash_quarantine import is_quarantined, quarantine
from inbox.receiving.in_hand import in_hand
from inbox.receiving.outcomes import (
    Received,
    defer_locked,
    duplicate,
    fail_stored,
    failure_of,
    handled,
    store_failure,
)
from inbox.receiving.reading import (
    Arrival,
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
from inbox.receiving.undecided import decide
from inbox.store import arrivals, claims, operating
from inbox.store.rows import UNIDENTIFIED, ConcurrentDuplicate, Failure, Follower, KeyBusy, OrderedKey, business_id
from inbox.transactions.handler_transaction import call, in_transaction
from inbox.transactions.persistence import DatabaseUnavailable, committed, run_with_reruns
from outbox.database.faults import is_collision
from outbox.kernel.body import Undecodable
from outbox.kernel.envelope import Envelope
from outbox.kernel.failures import NEVER_ENDED

_KEY_BUSY_BACKOFF = timedelta(seconds=0.5)


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
        acknowledge: called if the delivery may be acknowledged before this returns: under a lease in the database, its row and
            body are committed before the handler runs, possibly for longer than the broker waits for an acknowledgement.

    Raises:
        DatabaseUnavailable: the database does not answer; nothing was decided.
    """
    try:
        if arrival.refused:
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
    quarantined = quarantine.take()

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
        return _run_claimed(handler, stored, options, follower)
    finally:
        quarantine.leave()


def _run_claimed(handler: Handler, stored: InboxMessage, options: InboxOptions, follower: Follower | None) -> Received:
    attempt = stored.attempts
    if attempt > handler.retry.over(options.retry).max_attempts:
        error = stored.last_error or "Its attempts never ended: its process died, or its database became unavailable."
        failure = Failure(
            error=error,
            error_class=stored.error_class or NEVER_ENDED,
            error_place=stored.error_place,
            retry_after=None,
            attempts=attempt - 1,
        )
        return fail_stored(handler, stored, failure)
    if is_undecided(stored.biz_id):
        ended = decide(handler, stored, read(handler, undecided_envelope(stored), options))
        if ended is not None:
            return ended
    envelope = stored_envelope(stored)
    try:
        biz_id = identify_late(handler, message_of(envelope, options, needs_id=False), stored)
    except Undecodable as error:
        return _refuse(handler, stored, envelope, why_undecodable(error), options)
    if biz_id != stored.biz_id and not committed(lambda: claims.rekey(handler.using, stored.pk, biz_id), handler.using):
        reason = f"its biz-id is {biz_id}, and another message of that name is here already"
        committed(lambda: operating.skip(handler.using, stored.pk, reason), handler.using)
        return Received.DUPLICATE
    stored.biz_id = biz_id
    with in_hand.running(stored):
        if handler.lease:
            return leased.run_stored(handler, stored, envelope, options)
        return _run_in_transaction(handler, stored, envelope, options, follower)


def _refuse(handler: Handler, stored: InboxMessage, envelope: Envelope, why: str, options: InboxOptions) -> Received:
    """Make it a dead letter, because it cannot be read."""
    # If it was stored unread, nothing has used the biz-id in its headers; an unreadable message must not occupy it.
    unread = stored.state == State.RECEIVED and stored.attempts == 1 and not stored.ordered and stored.replaces_id is None
    if unread and not stored.biz_id.startswith(UNIDENTIFIED):
        return decide(handler, stored, read(handler, envelope, options, refused=why)) or Received.DEAD
    return fail_stored(handler, stored, Failure(error=why, retry_after=None, attempts=stored.attempts))


def _run_in_transaction(
    handler: Handler, stored: InboxMessage, envelope: Envelope, options: InboxOptions, follower: Follower | None
) -> Received:
    attempt, biz_id = stored.attempts, business_id(stored.biz_id)
    alone_in = OrderedKey(handler.name, stored.key) if stored.key and (handler.ordered or stored.ordered) else None

    def run() -> Message | None:
        message = message_of(envelope, options, needs_id=False, attempt=attempt, biz_id=biz_id)
        ran = in_transaction(
            handler,
            lambda: claims.begin_stored(
                handler.using,
                stored.pk,
                attempt,
                alone_in,
                follower,
                was=stored.state,
                longest_wait=options.DUPLICATE_TIMEOUT,
            ),
            lambda: call(handler, message, envelope),
            of=message.id,
            attempt=attempt,
        )
        return message if ran else None

    try:
        # A handler that loses its session at every run is rerun once in the first attempt, never in later ones.
        message = run_with_reruns(handler.using, run, reruns=attempt == 1)
    except DatabaseUnavailable as outage:
        outage.refund = partial(claims.give_back, handler.using, stored.pk, attempt)
        raise
    except KeyBusy:
        committed(lambda: claims.give_back(handler.using, stored.pk, attempt, _KEY_BUSY_BACKOFF), handler.using)
        return Received.STORED
    except ConcurrentDuplicate:
        return defer_locked(handler, stored)
    except BaseException as error:  # noqa: BLE001 - see _receive_fresh
        return fail_stored(handler, stored, failure_of(handler, error, attempt, options, row=stored.pk))
    return handled(handler, message) if message else Received.DUPLICATE


def _receive_fresh(handler: Handler, arrival: Arrival, options: InboxOptions) -> Received:
    messages = messages_of(arrival, options)

    def run() -> Message | None:
        message = next(messages)
        ran = in_transaction(
            handler,
            lambda: arrivals.begin_fresh(handler.using, arrival.row, options.DUPLICATE_TIMEOUT),
            lambda: call(handler, message, arrival.envelope),
            of=message.id,
        )
        return message if ran else None

    try:
        message = run_with_reruns(handler.using, run)
    except (DatabaseUnavailable, ConcurrentDuplicate):
        raise
    # No signal arrives where handlers run, so even KeyboardInterrupt comes from the handler.
    except BaseException as error:  # noqa: BLE001
        return store_failure(handler, arrival.row, failure_of(handler, error, 1, options), options)
    return handled(handler, message) if message else duplicate(handler, arrival.row)


def _receive_carefully(handler: Handler, arrival: Arrival, options: InboxOptions) -> Received:
    (became,) = admit(handler, [(arrival, True)], options)
    if became is not Received.STORED:
        return became
    claimed = claim_next([handler], handler.using, options)
    return run_stored(*claimed, options) if claimed else became
