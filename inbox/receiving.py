"""One delivery, one handler, one transaction: the exactly-once half.

*Fast path*, a fresh delivery: insert the inbox row, call the handler, hit the sentinel, commit; the caller acknowledges after
that. *Careful path*, a delivery the broker has sent before: store it first, so that the attempt can be counted in a commit of
its own before the handler runs; a message that kills its process then runs out of attempts. Failed messages are stored, too,
and acknowledged: retries wait in the database, where people can see them.

Whatever happens, a delivery ends as one of `Received`; only PUT_OFF goes back to the broker.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any

from django.db import DatabaseError, InterfaceError, transaction
from django.dispatch import Signal

from inbox import signals, store
from inbox.conf import InboxOptions
from inbox.errors import Reject, RetryLater, TransactionEnded
from inbox.handlers import Handler, Message
from inbox.models import InboxMessage, State
from inbox.reading import Arrival, identify_late, message_of, messages_of, stored_envelope
from inbox.store import Earlier, Failure, Incoming, KeyBusy, NewRow, OrderedKey, Taken, TwinBusy
from inbox.transactions import TRIES_AT_ONCE, DatabaseAway, call, decided, in_transaction, persistently
from outbox.kernel.databases import drop_unusable_connections
from outbox.kernel.envelope import Undecodable
from outbox.kernel.faults import is_collision
from outbox.kernel.text import describe

logger = logging.getLogger(__name__)

_SHORTEST_DELAY = timedelta(seconds=1)
_KEY_BUSY_REST = timedelta(seconds=0.5)
_HAND_OVER_WAIT = timedelta(milliseconds=20)
"""How long the relay, which has others to hand over, waits for a twin."""


class Received(Enum):
    """What became of a delivery."""

    HANDLED = "handled"
    DUPLICATE = "duplicate"
    STORED = "stored"
    """Its attempt failed, or it was put on the careful path; the database has it."""
    DEAD = "dead"
    SHED = "shed"
    """Too many wait, and it may be dropped: written down, not handled."""
    PUT_OFF = "put off"
    """A twin has it in hand: not acknowledged, to be delivered again."""


def receive(handler: Handler, arrival: Arrival, options: InboxOptions, *, redelivered: bool) -> Received:
    """Take one delivery to its end.

    Raises:
        DatabaseAway: the database does not answer; nothing was decided.
    """
    try:
        if arrival.refused:
            return store_failure(handler, arrival.row, _refusal(arrival), options, redelivered=redelivered)
        if redelivered:
            return _receive_carefully(handler, arrival.row, options)
        return _receive_fresh(handler, arrival, options)
    except TwinBusy:
        return Received.PUT_OFF


def hand_over(handler: Handler, arrival: Arrival) -> None:
    """Store a delivery that has no broker, inside the caller's transaction, to be run by the runner.

    Raises:
        TwinBusy: its row is in a transaction's hands right now; roll back and hand over again.
    """
    if handler.ordered:
        given = [Incoming(row=arrival.row, refused=arrival.refused, quarantined=arrival.quarantined)]
        (taken,) = store.take_in(handler.using, given, dead_blocks=handler.on_dead == "block")
        if not taken.state and taken.earlier is None:
            raise TwinBusy
        _after_commit(handler, lambda: taken_in(handler, arrival, taken))
        return
    if arrival.refused:
        failure = _refusal(arrival)
        if store.store_failed(handler.using, arrival.row, failure, _HAND_OVER_WAIT):
            _after_commit(handler, lambda: announce(handler, arrival.row.message_id, arrival.row.biz_id, failure))
            return
    elif store.store_due(handler.using, arrival.row, _HAND_OVER_WAIT):
        return
    earlier = store.count_duplicate(handler.using, arrival.row)
    if earlier is None:
        raise TwinBusy
    _after_commit(handler, lambda: _announce_duplicate(handler, arrival.row, earlier))


def claim_next(handlers: Sequence[Handler], alias: str, options: InboxOptions) -> tuple[Handler, InboxMessage] | None:
    """Claim one stored message that is due on `alias`, its attempt counted; None when there is none.

    Raises:
        DatabaseAway: the database does not answer.
    """
    known = {handler.name: handler for handler in handlers if handler.using == alias}
    try:
        drop_unusable_connections()
        stored = store.claim_due(alias, list(known), options.REDELIVERY_AFTER)
    except (DatabaseError, InterfaceError) as error:
        if is_collision(error):
            return None
        raise DatabaseAway(str(error)) from error
    return (known[stored.handler], stored) if stored else None


def run_stored(handler: Handler, stored: InboxMessage, options: InboxOptions) -> Received:
    """Run a stored message whose attempt has been claimed."""
    attempt = stored.attempts
    if attempt > options.MAX_ATTEMPTS:
        error = stored.last_error or "Its attempts were begun and never ended: its process died, or its database went away."
        return fail_stored(handler, stored, Failure(error=error, retry_after=None, attempts=attempt - 1))
    envelope = stored_envelope(stored)
    try:
        biz_id = identify_late(handler, message_of(envelope, options, needs_id=False), stored)
    except Undecodable as error:
        return fail_stored(handler, stored, Failure(error=str(error), retry_after=None, attempts=attempt))
    if biz_id != stored.biz_id and not decided(lambda: store.rekey(handler.using, stored.pk, biz_id), handler.using):
        reason = f"its biz-id is {biz_id}, and another message of that name is here already"
        decided(lambda: store.skip(handler.using, stored.pk, reason), handler.using)
        return Received.DUPLICATE

    alone_in = OrderedKey(handler.name, stored.key) if stored.key and (handler.ordered or stored.ordered) else None

    def run() -> Message | None:
        message = message_of(envelope, options, needs_id=False, attempt=attempt, biz_id=biz_id)
        ran = in_transaction(
            handler,
            lambda: store.begin_stored(handler.using, stored.pk, attempt, alone_in),
            lambda: call(handler, message, envelope),
            of=message.id,
            attempt=attempt,
        )
        return message if ran else None

    try:
        message = persistently(handler.using, run)
    except DatabaseAway as away:
        away.owed = partial(store.give_back, handler.using, stored.pk, attempt)
        raise
    except KeyBusy:
        decided(lambda: store.give_back(handler.using, stored.pk, attempt, _KEY_BUSY_REST), handler.using)
        return Received.STORED
    except BaseException as error:  # noqa: BLE001 - see _receive_fresh
        return fail_stored(handler, stored, _failure(error, attempt, options))
    return handled(handler, message) if message else Received.DUPLICATE


# ------------------------------------------------------------------------------------------------------------------- outcomes


def _receive_fresh(handler: Handler, arrival: Arrival, options: InboxOptions) -> Received:
    messages = messages_of(arrival, options)

    def run() -> Message | None:
        message = next(messages)
        ran = in_transaction(
            handler,
            lambda: store.begin_fresh(handler.using, arrival.row, options.TWIN_TIMEOUT),
            lambda: call(handler, message, arrival.envelope),
            of=message.id,
        )
        return message if ran else None

    try:
        message = persistently(handler.using, run)
    except (DatabaseAway, TwinBusy):
        raise
    # Handlers run where no signal arrives, so even KeyboardInterrupt is the handler's own.
    except BaseException as error:  # noqa: BLE001
        return store_failure(handler, arrival.row, _failure(error, 1, options), options)
    return handled(handler, message) if message else duplicate(handler, arrival.row)


def _receive_carefully(handler: Handler, row: NewRow, options: InboxOptions) -> Received:
    if not decided(lambda: store.store_due(handler.using, row, options.TWIN_TIMEOUT), handler.using):
        return duplicate(handler, row, redelivered=True)
    claimed = claim_next([handler], handler.using, options)
    return run_stored(*claimed, options) if claimed else Received.STORED


def store_failure(
    handler: Handler, row: NewRow, failure: Failure, options: InboxOptions, *, redelivered: bool = False
) -> Received:
    if not decided(lambda: store.store_failed(handler.using, row, failure, options.TWIN_TIMEOUT), handler.using):
        return duplicate(handler, row, redelivered=redelivered)
    return announce(handler, row.message_id, row.biz_id, failure)


def fail_stored(handler: Handler, stored: InboxMessage, failure: Failure) -> Received:
    passed_over = stored.ordered and handler.on_dead == "skip"
    leaves = OrderedKey(handler.name, stored.key) if passed_over else None
    ours = decided(lambda: store.fail_stored(handler.using, stored.pk, stored.attempts, failure, leaves=leaves), handler.using)
    if not ours:
        decided(lambda: store.note_error(handler.using, stored.pk, failure), handler.using)
        return _bury(handler, stored.pk, stored.message_id, stored.biz_id) or Received.DUPLICATE
    return announce(handler, stored.message_id, stored.biz_id, failure)


def duplicate(handler: Handler, row: NewRow, *, redelivered: bool = False) -> Received:
    return _met(
        handler, row, decided(lambda: store.count_duplicate(handler.using, row, redelivered=redelivered), handler.using)
    )


def taken_in(handler: Handler, arrival: Arrival, taken: Taken) -> Received:
    """Tell what became of a delivery of an ordered handler when it was stored."""
    if taken.state == State.DEAD:
        return announce(handler, arrival.row.message_id, arrival.row.biz_id, _refusal(arrival))
    return Received.STORED if taken.state else _met(handler, arrival.row, taken.earlier)


def _met(handler: Handler, row: NewRow, earlier: Earlier | None) -> Received:
    """What becomes of a duplicate that met this; None: it is being run right now, or is gone meanwhile."""
    if earlier is None:
        return Received.PUT_OFF
    if earlier.abandoned and (buried := _bury(handler, earlier.row, row.message_id, row.biz_id)):
        return buried
    _announce_duplicate(handler, row, earlier)
    return Received.DUPLICATE


def _bury(handler: Handler, pk: int, message_id: str, biz_id: str) -> Received | None:
    if not decided(lambda: store.bury_abandoned(handler.using, pk), handler.using):
        return None
    return announce(handler, message_id, biz_id, Failure(error=store.ABANDONED, retry_after=None, attempts=1))


def _refusal(arrival: Arrival) -> Failure:
    return Failure(error=arrival.refused, retry_after=None, attempts=0, quarantined=arrival.quarantined)


def _failure(error: BaseException, attempt: int, options: InboxOptions) -> Failure:
    if isinstance(error, RetryLater):
        rest = options.retry.delay(attempt) if error.delay is None else max(error.delay, _SHORTEST_DELAY)
        return Failure(error=f"put off: {describe(error)}", retry_after=rest, attempts=attempt - 1, put_off=True)
    trace = "".join(traceback.format_exception(error))
    if is_collision(error):
        # Nobody's fault, however often: it rests like after a failure and counts as no attempt.
        text = f"collided with other transactions {TRIES_AT_ONCE} times: {describe(error)}"
        return Failure(error=text, traceback=trace, retry_after=options.retry.delay(1), attempts=attempt - 1)
    if isinstance(error, Reject):
        return Failure(error=f"rejected: {describe(error)}", traceback=trace, retry_after=None, attempts=attempt)
    text = f"{type(error).__name__}: {describe(error)}"
    last = isinstance(error, TransactionEnded) or options.retry.exhausted(attempt)
    return Failure(error=text, traceback=trace, retry_after=None if last else options.retry.delay(attempt), attempts=attempt)


def announce(handler: Handler, message_id: str, biz_id: str, failure: Failure) -> Received:
    dead = failure.retry_after is None
    if dead:
        level, fate = logging.ERROR, f"is a dead letter after attempt {failure.attempts}"
    else:
        # What a handler put off is no failure.
        level = logging.INFO if failure.put_off else logging.WARNING
        rest = failure.retry_after or timedelta()
        fate = f"is tried again in {rest.total_seconds():.0f} s"
    logger.log(
        level, "%s: message %s (biz-id %s) %s: %s", handler.name, message_id or "without id", biz_id, fate, failure.error
    )
    _tell(
        signals.message_dead if dead else signals.message_retrying,
        handler=handler.name,
        message_id=message_id,
        error=failure.error,
    )
    return Received.DEAD if dead else Received.STORED


def _announce_duplicate(handler: Handler, row: NewRow, earlier: Earlier) -> None:
    names = {"handler": handler.name, "message_id": row.message_id, "biz_id": row.biz_id}
    if earlier.conflicting:
        logger.error(
            "Message %(message_id)s for %(handler)s has the biz-id %(biz_id)s of an earlier one, but says something else. It "
            "was not run; look for the bug upstream.",
            names,
        )
        _tell(signals.conflicting_duplicate, **names)
    if earlier.state == State.DEAD:
        logger.error(
            "Message %(message_id)s for %(handler)s has the biz-id %(biz_id)s of a dead letter, and was not run. Retry or skip "
            "that one to decide about both.",
            names,
        )
    _tell(signals.duplicate_suppressed, cause=earlier.cause.value, **names)


def handled(handler: Handler, message: Message) -> Received:
    logger.debug("%s: handled message %s (biz-id %s).", handler.name, message.id, message.biz_id)
    _tell(signals.message_handled, message=message, handler=handler.name)
    return Received.HANDLED


def shed(handler: Handler, row: NewRow, reason: str) -> Received:
    _tell(signals.message_shed, handler=handler.name, message_id=row.message_id, biz_id=row.biz_id, reason=reason)
    return Received.SHED


def _after_commit(handler: Handler, announce: Callable[[], object]) -> None:
    transaction.on_commit(announce, using=handler.using, robust=True)


def _tell(signal: Signal, **arguments: Any) -> None:
    try:
        signal.send_robust(sender=InboxMessage, **arguments)
    except BaseException:
        # send_robust lets SystemExit through, and the state is committed.
        logger.exception("A receiver of an inbox signal tried to end the process.")
