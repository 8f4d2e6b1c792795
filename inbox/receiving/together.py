"""Many fresh deliveries in one transaction: a batch that its handler takes at once, or single calls that share a commit.

One bulk INSERT, the handler, one sentinel over all rows, one commit. Any error rolls all of them back. Then the caller runs
smaller parts, down to single messages, so that a poisoned message fails alone.

Source of the idea: group commit in databases (DeWitt et al. 1984), to save round trips instead of disk writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from django.db import connections

from exactly_once.wire.text import describe
from inbox.conf import InboxOptions
from inbox.errors import TransactionEnded
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.receiving.in_hand import in_hand
from inbox.receiving.outcomes import Received, duplicate, failure_of, handled, store_failure
from inbox.receiving.reading import Arrival, messages_of
from inbox.store import together
from inbox.store.rows import ConcurrentDuplicate, Failure, Guard, NewRow
from inbox.transactions.handler_transaction import call, in_transaction
from inbox.transactions.observed import observed
from inbox.transactions.persistence import DatabaseUnavailable, run_with_reruns

logger = logging.getLogger(__name__)


def receive_together(handler: Handler, arrivals: Sequence[Arrival], options: InboxOptions) -> list[Received] | None:
    """Process fresh deliveries, none of them refused, in one transaction; returns the outcome of each, in their order.

    None: they failed together, without any effect; run them in smaller parts.

    Raises:
        DatabaseUnavailable: the database does not answer; nothing was decided.
    """
    rows = [arrival.row for arrival in arrivals]
    with in_hand.holding(rows) as free:
        if not free or any(map(in_hand.is_elsewhere, rows)):
            return None
        return _run_together(handler, arrivals, options)


def _run_together(handler: Handler, arrivals: Sequence[Arrival], options: InboxOptions) -> list[Received] | None:
    messages: dict[int, Message] = {}

    def begin() -> Guard | None:
        messages.clear()
        begun = together.begin_together(handler.using, [arrival.row for arrival in arrivals], options.DUPLICATE_TIMEOUT)
        if begun is None:
            return None
        guard, rows = begun
        messages.update((id(row), next(fresh[id(row)])) for row in rows)
        return guard

    def run() -> None:
        if handler.batch:
            with observed(handler, *(of[row].envelope for row in messages)):
                handler.call(*messages.values())
            return
        for row, message in messages.items():
            call(handler, message, of[row].envelope)
        # Single calls would each have their own commit: a hook that raises must not stop the others' hooks.
        connection: Any = connections[handler.using]
        connection.run_on_commit = [
            (savepoints, partial(_run_hook, handler, hook), False) for savepoints, hook, _ in connection.run_on_commit
        ]

    of: dict[int, Arrival] = {id(arrival.row): arrival for arrival in arrivals}
    fresh = {row: messages_of(arrival, options) for row, arrival in of.items()}
    try:
        of_all = f"{len(arrivals)} messages"
        run_with_reruns(handler.using, lambda: in_transaction(handler, begin, run, of=of_all), reruns=False)
    except DatabaseUnavailable:
        raise
    except ConcurrentDuplicate:
        return None
    # No signal arrives where handlers run, so even KeyboardInterrupt comes from the handler.
    except BaseException as error:  # noqa: BLE001
        if isinstance(error, TransactionEnded) and error.is_stored:
            failure = failure_of(handler, error, 1, options)
            return [_dead(handler, arrival.row, failure, options, messages) for arrival in arrivals]
        logger.info(
            "%s: %d messages in one transaction were rolled back and are run in smaller parts: %s",
            handler.name,
            len(arrivals),
            describe(error),
        )
        return None
    return [_told(handler, arrival.row, messages.get(id(arrival.row))) for arrival in arrivals]


def _run_hook(handler: Handler, hook: Callable[[], object]) -> None:
    try:
        hook()
    except Exception:
        logger.exception("An on_commit hook of %s failed after its effect was committed.", handler.name)


def _dead(handler: Handler, row: NewRow, failure: Failure, options: InboxOptions, messages: Mapping[int, Message]) -> Received:
    """The handler committed by itself and failed: its messages are dead letters now."""
    return store_failure(handler, row, failure, options) if id(row) in messages else duplicate(handler, row)


def _told(handler: Handler, row: NewRow, message: Message | None) -> Received:
    if message is not None:
        return handled(handler, message)
    try:
        return duplicate(handler, row)
    except DatabaseUnavailable:
        # The others are committed; running all of them again would count them as duplicates.
        return Received.DEFERRED
