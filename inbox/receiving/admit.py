"""Admitting: storing deliveries that are not handled in the transaction which inserts their rows.

A fresh delivery is handled at once, and its row and its effect commit together (`execute`, `together`). Every other delivery is
stored first, many with one statement, and acknowledged after that commit; a runner handles it later:

- a delivery to an *ordered* handler. Handlers cannot be called in the order of a broker's queue: a failed delivery returns
  behind others, and two processes that share a queue run concurrently. One consumer at a time stores the deliveries of a queue
  in their order; from then on the order of a key is that of its rows (`store.ordering`).
- a delivery that the broker has made before, so that its attempt can be counted before it is handled.
- a delivery that has waited too long for a worker, its batch or a token of its rate limit. RabbitMQ closes the channel of a
  consumer that leaves a delivery unacknowledged for longer than `consumer_timeout`.
- a delivery that is refused, which is stored as a dead letter, or dropped by load shedding, which is stored as `shed`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from django.db import DatabaseError, transaction

from exactly_once.sql.connections import lock_timeout
from exactly_once.wire.text import describe
from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler
from inbox.limits.shedder import shedder_of
from inbox.receiving.in_hand import in_hand
from inbox.receiving.outcomes import Received, admitted, unfit
from inbox.receiving.reading import Arrival
from inbox.store import intake, ordering
from inbox.store.intake import Incoming, Taken
from inbox.store.rows import ConcurrentDuplicate, NewRow, undecoded
from inbox.transactions.persistence import DatabaseUnavailable, committed

logger = logging.getLogger(__name__)

_HAND_OVER_WAIT = timedelta(milliseconds=20)
"""How long the relay waits for a concurrent duplicate, because other messages wait behind."""


def admit(
    handler: Handler, deliveries: Sequence[tuple[Arrival, bool]], options: InboxOptions, *, shed: str = ""
) -> list[Received]:
    """Store deliveries of one handler in one transaction, in their order; returns the outcome of each.

    For an ordered handler, no other thread may admit deliveries of the same queue meanwhile, and after an error the same
    deliveries must be admitted again before any later one of that queue.

    Args:
        deliveries: each with whether the broker has delivered this message before.
        shed: why load shedding drops them; "" stores them to be handled.

    Raises:
        DatabaseUnavailable: the database does not answer, or the deliveries of an ordered handler could not be stored for any
            reason. Nothing was decided.
        django.db.Error: the database refuses to store one delivery of an unordered handler, even without its values.
    """
    incoming = [_incoming(handler, arrival, shed, redelivered=redelivered) for arrival, redelivered in deliveries]
    inserted = _in_one_order(handler, incoming)

    def write() -> list[Taken]:
        with ordering.deciding(handler.using, options.DUPLICATE_TIMEOUT):
            taken = intake.store_incoming(
                handler.using, [incoming[index] for index in inserted], dead_blocks=not handler.skips_dead
            )
        by_index = dict(zip(inserted, taken, strict=True))
        return [by_index[index] for index in range(len(incoming))]

    try:
        taken = committed(write, handler.using)
    except DatabaseUnavailable:
        raise
    except ConcurrentDuplicate as error:
        if handler.ordered:
            reason = f"a transaction has had one of these messages in hand for over {options.DUPLICATE_TIMEOUT}"
            raise DatabaseUnavailable(reason) from error
        # Every part with that message waits for it again, so there must be only one.
        alone = [[delivery] for delivery in deliveries]
        return _admit_in_parts(handler, alone, options, shed) if len(alone) > 1 else [_defer(incoming[0].row, options)]
    except DatabaseError as error:
        # The values of single deliveries cause the error. Halves find them with the fewest transactions.
        if not (half := len(deliveries) // 2):
            return _without_values(handler, *deliveries[0], options, error)
        return _admit_in_parts(handler, [deliveries[:half], deliveries[half:]], options, shed)
    except Exception as error:
        if not handler.ordered:
            raise
        # No later delivery of the queue may be stored before these.
        logger.exception("%s: %d deliveries cannot be stored, and nothing goes past them.", handler.name, len(incoming))
        raise DatabaseUnavailable(f"its deliveries cannot be stored: {describe(error)}") from error
    became = [admitted(handler, arrival, one, shed) for (arrival, _), one in zip(deliveries, taken, strict=True)]
    if shedder := shedder_of(handler):
        shedder.dropped(became.count(Received.SHED))
    return became


def hand_over(handler: Handler, *arrivals: Arrival) -> None:
    """Store deliveries without a broker, in their order, inside the caller's transaction. The runner runs them.

    Raises:
        ConcurrentDuplicate: another transaction is handling one of these messages; roll back and hand them over again.
    """
    incoming = [_incoming(handler, arrival, "", redelivered=False) for arrival in arrivals]
    with lock_timeout(handler.using, _HAND_OVER_WAIT):
        taken = intake.store_incoming(handler.using, incoming, dead_blocks=not handler.skips_dead)
    if any(not one.state and one.earlier is None for one in taken):
        raise ConcurrentDuplicate

    def announce() -> None:
        for arrival, one in zip(arrivals, taken, strict=True):
            admitted(handler, arrival, one)

    transaction.on_commit(announce, using=handler.using, robust=True)


def _defer(row: NewRow, options: InboxOptions) -> Received:
    in_hand.remember_elsewhere(row, options.DUPLICATE_TIMEOUT)
    return Received.DEFERRED


def _in_one_order(handler: Handler, incoming: Sequence[Incoming]) -> Sequence[int]:
    """The indexes of `incoming` in the order to insert them in.

    Two transactions that insert copies of the same messages must not deadlock. The deliveries of an ordered
    handler are inserted as they came; one transaction at a time inserts those of a queue.
    """
    indexes = range(len(incoming))
    return indexes if handler.ordered else sorted(indexes, key=lambda index: incoming[index].row.biz_id)


def _incoming(handler: Handler, arrival: Arrival, shed: str, *, redelivered: bool) -> Incoming:
    return Incoming(
        row=arrival.row,
        in_order=bool(handler.ordered),
        refused=arrival.refused,
        quarantined=arrival.quarantined,
        redelivered=redelivered,
        shed="" if arrival.refused else shed,
    )


def _admit_in_parts(
    handler: Handler, parts: Sequence[Sequence[tuple[Arrival, bool]]], options: InboxOptions, shed: str
) -> list[Received]:
    """Admit the parts in their order, each in its own transaction."""
    became: list[Received] = []
    for part in parts:
        try:
            became += admit(handler, part, options, shed=shed)
        except DatabaseError as error:
            # It is a single delivery. The others are stored, and must not be stored again because of this one.
            became.append(Received.UNSTORED)
            logger.error(  # noqa: TRY400 - the reason says it all
                "%s: message %s cannot be stored; it stays unacknowledged and is tried again later: %s",
                handler.name,
                part[0][0].row.message_id or "without id",
                describe(error),
            )
    return became


def _without_values(
    handler: Handler, arrival: Arrival, redelivered: bool, options: InboxOptions, error: DatabaseError
) -> list[Received]:
    """Store a delivery whose values the database refuses as a dead letter with its body only."""
    body_only = replace(arrival, row=undecoded(arrival.row), refused=unfit(error))
    if arrival.refused == body_only.refused:
        if handler.ordered:
            raise DatabaseUnavailable(f"a delivery cannot be stored, and nothing goes past it: {describe(error)}") from error
        raise error
    return admit(handler, [(body_only, redelivered)], options)
