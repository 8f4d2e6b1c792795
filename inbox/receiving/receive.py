"""Deliveries, each from its beginning to its outcome.

*Fast path*, for fresh deliveries: begin, call, prove and commit in one transaction, then settle. It takes one message or many.
They begin with the INSERT of their rows, by one statement. The handler is called, the commit sentinel proves that the
transaction is still the one that began, and after the commit the outcome is settled; then the caller acknowledges. Many
messages are a batch that its handler takes at once, or single calls that share a commit: group commit in databases (DeWitt et
al. 1984), to save round trips instead of disk writes. Any error rolls all of them back. Then the caller runs smaller parts,
down to single messages, so that a poisoned message fails alone.

*Careful path*, for a delivery that the broker has made before: store it first, so that the attempt is counted in its own commit
before the handler runs; a message that kills its process then runs out of attempts. Failed messages are also stored and
acknowledged: their retries are visible in the database.

Every delivery ends as one of `Outcome`. Only DEFERRED and UNSTORED are not acknowledged, and are processed again.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from django.db import connections

from exactly_once.wire.envelope import Envelope
from exactly_once.wire.text import describe
from inbox.conf import InboxOptions
from inbox.errors import TransactionEnded
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.outcome import Outcome
from inbox.receiving import leased
from inbox.receiving.admit import admit
from inbox.receiving.claimed import claim_next, run_stored
from inbox.receiving.in_hand import in_hand
from inbox.receiving.outcomes import Policy
from inbox.receiving.reading import Arrival, is_parked
from inbox.store import arrivals as store
from inbox.store.rows import ConcurrentDuplicate, Guard, NewRow
from inbox.transactions.handler_transaction import call, transact
from inbox.transactions.persistence import DatabaseUnavailable

logger = logging.getLogger(__name__)


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
            return [leased.receive(handler, first, options, acknowledge=acknowledge)]
        if (held := in_hand.take([arrival.row for arrival in arrivals])) is not None:
            if first.unread or first.row.redelivered:
                return [_receive_carefully(handler, first, options)]
            return run_fresh(Policy(handler, options), arrivals)
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


def run_fresh(policy: Policy, arrivals: Sequence[Arrival]) -> list[Outcome] | None:
    """Run fresh deliveries in one transaction; returns the outcome of each. None: several of them must be run in smaller parts.

    Raises:
        DatabaseUnavailable: the database does not answer; nothing was decided.
        ConcurrentDuplicate: another transaction is handling the message of the single delivery.
    """
    handler, options, single = policy.handler, policy.options, len(arrivals) == 1
    rows = [arrival.row for arrival in arrivals]
    ran: dict[int, Message] = {}

    def begin() -> Guard | None:
        ran.clear()
        guard = store.begin_fresh(
            handler.using, rows, options.DUPLICATE_TIMEOUT, attempt=policy.attempt, result=policy.default_result
        )
        for index in guard.begun if guard is not None else ():
            ran[index] = policy.message_for_run(arrivals[index])
        return guard

    def run() -> str | None:
        return _call_all(policy, [(message, arrivals[index].envelope) for index, message in ran.items()])

    try:
        of = rows[0].message_id if single else f"{len(rows)} messages"
        transact(handler, begin, run, of=of, attempt=policy.attempt, durable=policy.durable, reruns=policy.reruns and single)
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
    if ran:
        policy.settle_success([*ran.values()])
    return [Outcome.HANDLED if index in ran else _duplicate(policy, row, single=single) for index, row in enumerate(rows)]


def _call_all(policy: Policy, given: Sequence[tuple[Message, Envelope]]) -> str | None:
    """One call with all messages, or one for each."""
    handler = policy.handler
    if len(given) == 1 or handler.batch:
        returned = call(handler, given)
        return policy.encode_result(returned) if policy.encode_result else None
    for one in given:
        call(handler, [one])
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


def _duplicate(policy: Policy, row: NewRow, *, single: bool) -> Outcome:
    try:
        return policy.settle_duplicate(row)
    except DatabaseUnavailable:
        if single:
            raise
        # The others are committed; running all of them again would count them as duplicates.
        return Outcome.DEFERRED
