"""Messages in the hands of clients: claimed under a lease, and settled by its fencing token.

A client has a message until it acknowledges or releases it, or until the lease ends; then another client gets it. Attempts are
counted when a message is claimed, in the commit before the answer, so a message whose clients die runs out of attempts.

The leases are those of the database (`store.lease_rows`), whatever `INBOX["LEASE_STORE"]` is: the messages have rows.
"""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from typing import Any

from exactly_once.failures import DEFERRED
from exactly_once.process.logs import escaping_logger
from exactly_once.upkeep.minutes import MinuteWriter
from exactly_once.wire.text import describe
from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.models import InboxMessage
from inbox.receiving.outcomes import announce, defer_locked, fail_stored, redacted
from inbox.receiving.parking import open_claimed
from inbox.receiving.reading import message_for, stored_arrival
from inbox.receiving.receive import handled
from inbox.states import Outcome, State
from inbox.store import claims, counting, lease_rows, receipts
from inbox.store.message_rows import ConcurrentDuplicate, Failure, KeyBusy
from inbox.transactions.arrival import Arrival
from inbox.transactions.running import committed

logger = escaping_logger(__name__)

REPORTED = "reported by a client"
"""The class of failures that clients report."""
_LARGEST_ANSWER_BYTES = 8 * 1024 * 1024
_DEEPER = 150
"""Levels of nesting."""
_NOT_JSON = (
    "Clients cannot read its payload: it contains NaN or Infinity, which Python reads and JSON does not have, or is nested too "
    "deeply. Correct the payload."
)
_KEY_BUSY_BACKOFF = timedelta(seconds=0.5)
_writing = threading.Lock()
_writers: dict[str, MinuteWriter] = {}


def claim(handler: Handler, most: int, lease: timedelta, options: InboxOptions) -> list[tuple[str, Message]]:
    """Claim due messages, those due longest first, each in commits of its own, until their payloads exceed 8 MiB.

    Returns:
        each message, after the name of its lease.

    Raises:
        DatabaseUnavailable: the database does not answer, and no message was claimed before.
    """
    claimed: list[tuple[str, Message]] = []
    size = 0
    # Messages that cannot be read are settled on the way; they count, so that many of them do not delay the answer.
    try:
        for _ in range(most):
            if size > _LARGEST_ANSWER_BYTES or (stored := _claim_due(handler, options)) is None:
                break
            if leased := _lease(handler, stored, lease, options):
                name, message, length = leased
                claimed.append((name, message))
                size += length
    except Exception as error:
        # No other client gets the messages that were claimed before the error until their leases end.
        if not claimed:
            raise
        logger.warning("http: %s: %d messages are answered, and no more: %s", handler.name, len(claimed), describe(error))
    return claimed


def acknowledge(handler: Handler, names: Sequence[str], options: InboxOptions) -> dict[str, bool]:
    """running → done. A repeated acknowledgement of the same lease is accepted."""

    def settle(stored: InboxMessage, arrival: Arrival) -> bool:
        done = committed(handler.using, lease_rows.consume, stored.pk, stored.fence, arrival.order)
        if done and stored.state == State.RUNNING:
            handled(handler, [message_for(arrival, options)])
            counting.time_stored_effect(handler.using, handler.name, stored.received_at)
        return done

    return _settle_each(handler, names, settle)


def extend(handler: Handler, names: Sequence[str], lease: timedelta) -> dict[str, bool]:
    """running → running, until `lease` from now."""

    def settle(stored: InboxMessage, arrival: Arrival) -> bool:
        return committed(handler.using, lease_rows.extend, stored.pk, stored.fence, lease)

    return _settle_each(handler, names, settle)


def release(
    handler: Handler, names: Sequence[str], *, delay: timedelta | None, error: str, options: InboxOptions
) -> dict[str, bool]:
    """running → retrying, without an attempt, or with an `error` after a failed one; then dead if it was the last."""

    def settle(stored: InboxMessage, arrival: Arrival) -> bool:
        failure = _failure(handler, stored, delay, error, options)
        freed = committed(handler.using, lease_rows.free, stored.pk, stored.fence, failure, arrival.leaves(failure))
        if freed and stored.state == State.RUNNING:
            announce(handler.using, stored, failure)
        return freed

    return _settle_each(handler, names, settle)


def _claim_due(handler: Handler, options: InboxOptions) -> InboxMessage | None:
    return committed(handler.using, claims.claim_due, [handler.name], options.REDELIVERY_AFTER)


def _lease(handler: Handler, stored: InboxMessage, lease: timedelta, options: InboxOptions) -> tuple[str, Message, int] | None:
    """The lease of a claimed message, and the size of its payload; None if it is settled, or is not to be had now."""
    arrival = open_claimed(handler, stored, options)
    if isinstance(arrival, Outcome):
        return None
    message = arrival.message or message_for(arrival, options)
    if (length := _length(message.payload)) is None:
        fail_stored(handler, stored, Failure(error=_NOT_JSON, retry_after=None, attempts=stored.attempts))
        return None
    alias = handler.using
    try:
        granted = committed(alias, lease_rows.lease_stored, stored, lease, arrival.exclusive_key)
    except KeyBusy:
        committed(alias, claims.give_back, stored, _KEY_BUSY_BACKOFF)
        return None
    except ConcurrentDuplicate:
        defer_locked(handler, stored)
        return None
    if granted is None:
        return None
    return f"{granted.row}.{granted.fence}", replace(message, fence=granted.fence), length


def _length(payload: Any) -> int | None:
    """Of this payload in an answer; None if clients could read no message of that answer."""
    # The answer is written with a deeper stack than that of this thread.
    nested = reduce(lambda inner, _: [inner], range(_DEEPER), payload)
    try:
        return len(json.dumps(nested, allow_nan=False)) - 2 * _DEEPER
    except (ValueError, RecursionError):
        return None


def _settle_each(handler: Handler, names: Sequence[str], settle: Callable[[InboxMessage, Arrival], bool]) -> dict[str, bool]:
    """Settle each lease in its own commit, so that one that has ended does not keep the others. False: it had ended."""
    settled: dict[str, bool] = {}
    for name in names:
        pk, fence = map(int, name.split("."))
        stored = committed(handler.using, _find, handler.name, pk, fence)
        settled[name] = stored is not None and settle(stored, stored_arrival(handler, stored))
    _write_statistics(handler.using)
    return settled


def _find(alias: str, handler: str, pk: int, fence: int) -> InboxMessage | None:
    """The row, if no later lease was granted. Its handler is compared, because a lease is not a secret."""
    found: InboxMessage | None = receipts.message(alias, pk).filter(handler=handler, fence=fence).first()
    return found


def _failure(handler: Handler, stored: InboxMessage, delay: timedelta | None, error: str, options: InboxOptions) -> Failure:
    if not error:
        return Failure(
            error="deferred: released by a client",
            error_class=DEFERRED,
            retry_after=delay or timedelta(),
            attempts=stored.attempts - 1,
            deferred=True,
        )
    policy = handler.retry.over(options.retry)
    retry_after = policy.delay(stored.attempts) if delay is None else delay
    failure = Failure(
        error=error,
        error_class=REPORTED,
        retry_after=None if policy.exhausted(stored.attempts) else retry_after,
        attempts=stored.attempts,
    )
    return redacted(failure, options)


def _write_statistics(alias: str) -> None:
    """Write the statistics of a web process, which sends no heartbeats: with a request, at most once a minute."""
    if not _writing.acquire(blocking=False):
        return
    try:
        if alias not in _writers:
            _writers[alias] = counting.writer(alias)
        _writers[alias].write_if_due()
    finally:
        _writing.release()
