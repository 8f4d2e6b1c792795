"""One message, one transaction: begin, call, prove, commit, settle.

A fresh delivery begins with the INSERT of its row; a stored message, whose attempt has been claimed, with the lock of its row.
The handler is called, the commit sentinel proves that the transaction is still the one that began, and after the commit the
outcome is settled. Every kind of work that has a transaction of its own takes these steps, and its `Policy` decides the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

from exactly_once.wire.envelope import Envelope
from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.models import InboxMessage
from inbox.receiving.outcomes import Received, defer_locked, duplicate, fail_stored, failure_of, handled, store_failure
from inbox.receiving.reading import Arrival
from inbox.store import arrivals, claims
from inbox.store.rows import ConcurrentDuplicate, Follower, Guard, KeyBusy, NewRow, OrderedKey
from inbox.transactions.handler_transaction import call, in_transaction
from inbox.transactions.persistence import DatabaseUnavailable, committed, run_with_reruns

_KEY_BUSY_BACKOFF = timedelta(seconds=0.5)


class Policy:
    """What differs between kinds of work. This is the policy of messages: a failure is stored, and a runner retries it.

    A delivery may be acknowledged when the policy's method has returned a `Received`, except DEFERRED.

    Attributes:
        attempt: the number of a fresh delivery's attempt.
        durable: the transaction must not be a savepoint of the caller's.
        reruns: if its session is lost, the first attempt may be run once more.
        default_result: the JSON that a fresh row is inserted with as its handler's result.
    """

    attempt = 1
    durable = True
    reruns = True
    default_result: str | None = None

    def __init__(self, handler: Handler, options: InboxOptions) -> None:
        self.handler, self.options = handler, options

    def encode_result(self, returned: object) -> str | None:
        """The JSON that is stored with the row as the handler's result."""
        return None

    def settle_success(self, message: Message) -> Received:
        return handled(self.handler, message)

    def settle_fresh_failure(self, row: NewRow, error: BaseException) -> Received:
        return store_failure(self.handler, row, failure_of(self.handler, error, self.attempt, self.options), self.options)

    def settle_stored_failure(self, stored: InboxMessage, error: BaseException) -> Received:
        failure = failure_of(self.handler, error, stored.attempts, self.options, row=stored.pk)
        return fail_stored(self.handler, stored, failure)

    def settle_duplicate(self, row: NewRow) -> Received:
        """A row of this name exists."""
        return duplicate(self.handler, row)


def run_fresh(policy: Policy, arrival: Arrival, messages: Iterator[Message]) -> Received:
    """Run a fresh delivery.

    Args:
        messages: the handler's argument, a new one for each run.

    Raises:
        DatabaseUnavailable: the database does not answer; nothing was decided.
        ConcurrentDuplicate: another transaction is handling the same message.
    """
    handler, timeout = policy.handler, policy.options.DUPLICATE_TIMEOUT
    begin = partial(
        arrivals.begin_fresh, handler.using, arrival.row, timeout, attempt=policy.attempt, result=policy.default_result
    )
    try:
        message = _run(policy, begin, messages, arrival.envelope, policy.attempt)
    except (DatabaseUnavailable, ConcurrentDuplicate):
        raise
    # No signal arrives where handlers run, so even KeyboardInterrupt comes from the handler.
    except BaseException as error:  # noqa: BLE001
        return policy.settle_fresh_failure(arrival.row, error)
    return policy.settle_success(message) if message else policy.settle_duplicate(arrival.row)


def run_claimed(
    policy: Policy,
    stored: InboxMessage,
    envelope: Envelope,
    messages: Iterator[Message],
    follower: Follower | None = None,
) -> Received:
    """Run a stored message whose attempt has been claimed. If it is handled, `follower` has claimed the next message.

    Raises:
        DatabaseUnavailable: the database does not answer; its `refund` is of this attempt.
    """
    handler, attempt = policy.handler, stored.attempts
    alone_in = OrderedKey(handler.name, stored.key) if stored.key and (handler.ordered or stored.ordered) else None
    refund = partial(claims.give_back, handler.using, stored)
    begin = partial(
        claims.begin_stored,
        handler.using,
        stored,
        alone_in,
        follower,
        longest_wait=policy.options.DUPLICATE_TIMEOUT,
    )
    try:
        message = _run(policy, begin, messages, envelope, attempt)
    except DatabaseUnavailable as outage:
        outage.refund = refund
        raise
    except KeyBusy:
        committed(partial(refund, _KEY_BUSY_BACKOFF), handler.using)
        return Received.STORED
    except ConcurrentDuplicate:
        return defer_locked(handler, stored)
    except BaseException as error:  # noqa: BLE001 - see run_fresh
        return policy.settle_stored_failure(stored, error)
    return policy.settle_success(message) if message else Received.DUPLICATE


def _run(
    policy: Policy, begin: Callable[[], Guard | None], messages: Iterator[Message], envelope: Envelope, attempt: int
) -> Message | None:
    """Begin, call, prove and commit. None: `begin` found nothing to do."""
    handler = policy.handler

    def run() -> Message | None:
        message = next(messages)
        ran = in_transaction(
            handler,
            begin,
            lambda: call(handler, message, envelope),
            of=message.id,
            attempt=attempt,
            durable=policy.durable,
            encode_result=policy.encode_result,
        )
        return message if ran else None

    # A handler that loses its session at every run is rerun once in the first attempt, never in later ones.
    return run_with_reruns(handler.using, run, reruns=policy.reruns and attempt == 1)
