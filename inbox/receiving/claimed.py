"""Stored messages whose attempt has been claimed, each from its beginning to its outcome: retries, handed-over messages, the
careful path.

A run takes the same steps as that of a fresh delivery (`receive`), but begins with the lock of its row.
"""

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

from exactly_once.wire.body import Undecodable
from exactly_once.wire.envelope import Envelope
from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.models import InboxMessage
from inbox.outcome import Outcome
from inbox.receiving import leased
from inbox.receiving.attempt_refunds import refunds
from inbox.receiving.crash_quarantine import is_quarantined, quarantine
from inbox.receiving.in_hand import in_hand
from inbox.receiving.outcomes import Policy, defer_locked, fail_exhausted, fail_stored, failure_of
from inbox.receiving.parking import identify_parked, identify_unread
from inbox.receiving.reading import (
    Unidentifiable,
    identify_late,
    is_parked,
    message_of,
    read_body,
    stored_envelope,
    why_undecodable,
)
from inbox.states import State
from inbox.store import claims, statistics
from inbox.store.dialect import is_reachable
from inbox.store.rows import UNIDENTIFIED, ConcurrentDuplicate, Failure, KeyBusy, OrderedKey, Successor, business_id
from inbox.transactions.handler_transaction import call, transact
from inbox.transactions.persistence import DatabaseUnavailable, committed

logger = logging.getLogger(__name__)

_UNAVAILABLE_BACKOFF = timedelta(seconds=5)
_KEY_BUSY_BACKOFF = timedelta(seconds=0.5)


def claim_next(handlers: Sequence[Handler], alias: str, options: InboxOptions) -> tuple[Handler, InboxMessage] | None:
    """Claim one stored message that is due on `alias` and count its attempt; None if there is none.

    Raises:
        DatabaseUnavailable: the database does not answer.
    """
    known = {handler.name: handler for handler in handlers if handler.using == alias}
    stored: InboxMessage | None = None
    quarantined = quarantine.take(options.REDELIVERY_AFTER)

    def claim() -> InboxMessage | None:
        return claims.claim_due(alias, list(known), options.REDELIVERY_AFTER, quarantined=quarantined)

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
    lease, is_new = None, handler.lease is not None and is_parked(stored.biz_id)
    try:
        envelope = open_claimed(handler, stored, options)
        if handler.lease and isinstance(envelope, Envelope):
            lease = leased.acquire_stored(handler, stored, options, envelope if is_new else None)
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
    if isinstance(envelope, Outcome):
        return envelope
    with in_hand.running(stored):
        if handler.lease:
            return leased.run_stored(lease, stored, envelope, options)
        message = partial(
            message_of, envelope, options, needs_id=False, attempt=stored.attempts, biz_id=business_id(stored.biz_id)
        )
        return run_claimed(Policy(handler, options), stored, envelope, message, successor)


def open_claimed(handler: Handler, stored: InboxMessage, options: InboxOptions) -> Envelope | Outcome:
    """The content of a claimed message that can be run; the outcome of one that cannot.

    It cannot be run if its attempts are used up, it cannot be read, or its message has another row or is being handled.

    Raises:
        DatabaseUnavailable: the database does not answer.
    """
    if exhausted := fail_exhausted(handler, stored, options):
        return exhausted
    if is_parked(stored.biz_id):
        return identify_parked(handler, stored, options)
    envelope = stored_envelope(stored)
    try:
        biz_id = identify_late(handler, message_of(envelope, options, needs_id=False), stored)
    except Undecodable as error:
        return _refuse(handler, stored, envelope, why_undecodable(error), options)
    if biz_id != stored.biz_id:
        ours = committed(partial(claims.identify, handler.using, stored, {"biz_id": biz_id}), handler.using)
        if ours is False:
            reason = f"its biz-id is {biz_id}, which another message already has"
            committed(lambda: claims.skip_duplicate(handler.using, stored, reason), handler.using)
        if not ours:
            return Outcome.DUPLICATE
    return envelope


def _refuse(handler: Handler, stored: InboxMessage, envelope: Envelope, why: str, options: InboxOptions) -> Outcome:
    """Dead-letter a message that cannot be read."""
    # If it was stored unread, its biz-id comes from its headers. An unreadable message must not block that biz-id.
    unread = stored.state == State.RECEIVED and stored.attempts == 1 and not stored.ordered and stored.replaces_id is None
    if unread and not stored.biz_id.startswith(UNIDENTIFIED):
        arrival = read_body(handler, envelope, options, refused=why, redelivered=True)
        if (became := identify_unread(handler, stored, arrival)) is not None:
            return became
    return fail_stored(handler, stored, Failure(error=why, retry_after=None, attempts=stored.attempts))


def run_claimed(
    policy: Policy,
    stored: InboxMessage,
    envelope: Envelope,
    message_for_run: Callable[[], Message],
    successor: Successor | None = None,
) -> Outcome:
    """Run a stored message whose attempt has been claimed. If it is handled, `successor` has claimed the next message.

    Args:
        message_for_run: returns the handler's argument, a new one for each run.

    Raises:
        DatabaseUnavailable: the database does not answer. If no attempt was made, it is to be refunded.
        KeyBusy, ConcurrentDuplicate: another transaction runs its key, or has locked its row; no attempt was made.
    """
    handler, attempt = policy.handler, stored.attempts
    exclusive_key = OrderedKey(handler.name, stored.key) if stored.key and (handler.ordered or stored.ordered) else None
    longest_wait = policy.options.DUPLICATE_TIMEOUT
    begin = partial(claims.begin_stored, handler.using, stored, exclusive_key, successor, longest_wait=longest_wait)
    ran: list[Message] = []

    def run() -> str | None:
        ran[:] = [message_for_run()]
        returned = call(handler, [(ran[0], envelope)])
        return policy.encode_result(returned) if policy.encode_result else None

    # A handler that loses its session at every run is rerun once in the first attempt, never in later ones.
    reruns = policy.reruns and attempt == 1
    try:
        transact(handler, begin, run, of=stored.message_id, attempt=attempt, durable=policy.durable, reruns=reruns)
    except DatabaseUnavailable:
        refunds.add(handler.using, partial(claims.give_back, handler.using, stored))
        raise
    except (KeyBusy, ConcurrentDuplicate):
        raise
    except BaseException as error:  # noqa: BLE001 - see receive.run_fresh
        return policy.settle_stored_failure(stored, error)
    if not ran:
        return Outcome.DUPLICATE
    policy.settle_success(ran)
    return Outcome.HANDLED
