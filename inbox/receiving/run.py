"""One run: begin, call, prove and commit in one transaction, then settle. It takes one message or many.

Fresh deliveries begin with the INSERT of their rows, by one statement; a stored message, whose attempt has been claimed, with
the lock of its row. The handler is called, the commit sentinel proves that the transaction is still the one that began, and
after the commit the outcome is settled. Every kind of work that has a transaction of its own takes these steps, and its
`Policy` decides the rest.

Many messages are a batch that its handler takes at once, or single calls that share a commit: group commit in databases (DeWitt
et al. 1984), to save round trips instead of disk writes. Any error rolls all of them back. Then the caller runs smaller parts,
down to single messages, so that a poisoned message fails alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from django.db import connections

from exactly_once.wire.envelope import Envelope
from exactly_once.wire.text import describe
from inbox.conf import InboxOptions
from inbox.errors import TransactionEnded
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.models import InboxMessage
from inbox.outcome import Outcome
from inbox.receiving.outcomes import (
    defer_locked,
    duplicate,
    fail_stored,
    failure_of,
    handled,
    store_failure,
)
from inbox.receiving.reading import Arrival, messages_of
from inbox.store import arrivals as store
from inbox.store import claims
from inbox.store.rows import ConcurrentDuplicate, Guard, KeyBusy, NewRow, OrderedKey, Successor
from inbox.transactions.handler_transaction import call, in_transaction
from inbox.transactions.observed import observed
from inbox.transactions.persistence import DatabaseUnavailable, committed, run_with_reruns

logger = logging.getLogger(__name__)

_KEY_BUSY_BACKOFF = timedelta(seconds=0.5)


class Policy:
    """What differs between kinds of work. This is the policy of messages: a failure is stored, and a runner retries it.

    A delivery may be acknowledged when the policy's method has returned a `Outcome`, except DEFERRED.

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

    def messages_of(self, arrival: Arrival) -> Iterator[Message]:
        """The handler's argument, a new one for each run."""
        return messages_of(arrival, self.options)

    def encode_result(self, returned: object) -> str | None:
        """The JSON that is stored with the row as the handler's result."""
        return None

    def settle_success(self, message: Message) -> Outcome:
        return handled(self.handler, message)

    def settle_fresh_failure(self, row: NewRow, error: BaseException) -> Outcome:
        return store_failure(self.handler, row, failure_of(self.handler, error, self.attempt, self.options), self.options)

    def settle_stored_failure(self, stored: InboxMessage, error: BaseException) -> Outcome:
        failure = failure_of(self.handler, error, stored.attempts, self.options, row=stored.pk)
        return fail_stored(self.handler, stored, failure)

    def settle_duplicate(self, row: NewRow) -> Outcome:
        """A row of this name exists."""
        return duplicate(self.handler, row)


def run_fresh(policy: Policy, arrivals: Sequence[Arrival]) -> list[Outcome] | None:
    """Run fresh deliveries in one transaction; returns the outcome of each. None: several of them must be run in smaller parts.

    Raises:
        DatabaseUnavailable: the database does not answer; nothing was decided.
        ConcurrentDuplicate: another transaction is handling the message of the single delivery.
    """
    handler, options, single = policy.handler, policy.options, len(arrivals) == 1
    rows = [arrival.row for arrival in arrivals]
    fresh = [policy.messages_of(arrival) for arrival in arrivals]
    ran: dict[int, Message] = {}

    def begin() -> Guard | None:
        ran.clear()
        guard = store.begin_fresh(
            handler.using, rows, options.DUPLICATE_TIMEOUT, attempt=policy.attempt, result=policy.default_result
        )
        for index in guard.begun if guard is not None else ():
            ran[index] = next(fresh[index])
        return guard

    def run() -> object:
        return _call_all(handler, [(message, arrivals[index].envelope) for index, message in ran.items()])

    try:
        _transact(policy, begin, run, of=rows[0].message_id if single else f"{len(rows)} messages", reruns=single)
    except DatabaseUnavailable:
        raise
    except ConcurrentDuplicate:
        if single:
            raise
        return None
    # No signal arrives where handlers run, so even KeyboardInterrupt comes from the handler.
    except BaseException as error:  # noqa: BLE001
        if single or (isinstance(error, TransactionEnded) and error.is_stored):
            return [
                policy.settle_fresh_failure(row, error) if single or index in ran else policy.settle_duplicate(row)
                for index, row in enumerate(rows)
            ]
        logger.info(
            "%s: %d messages in one transaction were rolled back and are run in smaller parts: %s",
            handler.name,
            len(rows),
            describe(error),
        )
        return None
    return [_settled(policy, row, ran.get(index), single=single) for index, row in enumerate(rows)]


def run_claimed(
    policy: Policy,
    stored: InboxMessage,
    envelope: Envelope,
    messages: Iterator[Message],
    successor: Successor | None = None,
) -> Outcome:
    """Run a stored message whose attempt has been claimed. If it is handled, `successor` has claimed the next message.

    Raises:
        DatabaseUnavailable: the database does not answer; its `refund` is of this attempt.
    """
    handler, attempt = policy.handler, stored.attempts
    exclusive_key = OrderedKey(handler.name, stored.key) if stored.key and (handler.ordered or stored.ordered) else None
    refund = partial(claims.give_back, handler.using, stored)
    longest_wait = policy.options.DUPLICATE_TIMEOUT
    begin = partial(claims.begin_stored, handler.using, stored, exclusive_key, successor, longest_wait=longest_wait)
    ran: list[Message] = []

    def run() -> object:
        ran[:] = [next(messages)]
        return call(handler, ran[0], envelope)

    try:
        _transact(policy, begin, run, of=stored.message_id, attempt=attempt, reruns=attempt == 1)
    except DatabaseUnavailable as outage:
        outage.refund = refund
        raise
    except KeyBusy:
        committed(partial(refund, _KEY_BUSY_BACKOFF), handler.using)
        return Outcome.STORED
    except ConcurrentDuplicate:
        return defer_locked(handler, stored)
    except BaseException as error:  # noqa: BLE001 - see run_fresh
        return policy.settle_stored_failure(stored, error)
    return policy.settle_success(ran[0]) if ran else Outcome.DUPLICATE


def _transact(
    policy: Policy,
    begin: Callable[[], Guard | None],
    run: Callable[[], object],
    *,
    of: str,
    attempt: int | None = None,
    reruns: bool,
) -> None:
    """Begin, call, prove and commit. If `begin` finds nothing to do, `run` is not called."""
    transact = partial(
        in_transaction,
        policy.handler,
        begin,
        run,
        of=of,
        attempt=policy.attempt if attempt is None else attempt,
        durable=policy.durable,
        encode_result=policy.encode_result,
    )
    # A handler that loses its session at every run is rerun once in the first attempt, never in later ones.
    run_with_reruns(policy.handler.using, transact, reruns=policy.reruns and reruns)


def _call_all(handler: Handler, given: Sequence[tuple[Message, Envelope]]) -> object:
    """One call with all messages, or one for each."""
    if len(given) == 1:
        return call(handler, *given[0])
    if handler.batch:
        with observed(handler, *(envelope for _, envelope in given)):
            return handler.call(*(message for message, _ in given))
    for message, envelope in given:
        call(handler, message, envelope)
    # Single calls would each have their own commit: a hook that raises must not stop the others' hooks.
    connection: Any = connections[handler.using]
    connection.run_on_commit = [
        (savepoints, partial(_run_hook, handler, hook), False) for savepoints, hook, _ in connection.run_on_commit
    ]
    return None


def _run_hook(handler: Handler, hook: Callable[[], object]) -> None:
    try:
        hook()
    except Exception:
        logger.exception("An on_commit hook of %s failed after its effect was committed.", handler.name)


def _settled(policy: Policy, row: NewRow, message: Message | None, *, single: bool) -> Outcome:
    if message is not None:
        return policy.settle_success(message)
    try:
        return policy.settle_duplicate(row)
    except DatabaseUnavailable:
        if single:
            raise
        # The others are committed; running all of them again would count them as duplicates.
        return Outcome.DEFERRED
