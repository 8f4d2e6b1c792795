"""Admitting: storing deliveries that are not handled in the transaction which inserts their rows.

A fresh delivery is handled at once, and its row and its effect commit together (`run`). Every other delivery is stored first,
many with one statement, and acknowledged after that commit; a runner handles it later:

- a delivery to an *ordered* handler. Handlers cannot be called in the order of a broker's queue: a failed delivery returns
  behind others, and two processes that share a queue run concurrently. One consumer at a time stores the deliveries of a queue
  in their order; from then on the order of a key is that of its rows (`store.ordering`).
- a delivery that the broker has made before, so that its attempt can be counted before it is handled.
- a delivery that has waited too long for a worker, its batch or a token of its rate limit. RabbitMQ closes the channel of a
  consumer that leaves a delivery unacknowledged for longer than `consumer_timeout`.
- a delivery that is refused, which is stored as a dead letter, or dropped by load shedding, which is stored as `shed`.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from django.db import DatabaseError, transaction

from exactly_once.failures import REFUSED
from exactly_once.sql.connections import lock_timeout
from exactly_once.wire.text import ERROR_LENGTH, describe, printable
from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler
from inbox.limits.shedder import shedder_of
from inbox.receiving.in_hand import in_hand
from inbox.receiving.outcomes import admitted, unfit
from inbox.states import Outcome, State
from inbox.store import arrivals as fresh
from inbox.store import ordering
from inbox.store.arrivals import Admitted, Insertion, Values, in_lock_order
from inbox.store.message_rows import ConcurrentDuplicate, undecoded
from inbox.transactions.arrival import Arrival
from inbox.transactions.running import DatabaseUnavailable, committed

_HAND_OVER_WAIT = timedelta(milliseconds=20)
"""How long the relay waits for a concurrent duplicate, because other messages wait behind."""


def admit(
    handler: Handler,
    arrivals: Sequence[Arrival],
    options: InboxOptions,
    *,
    shed: str = "",
) -> list[Outcome]:
    """Store deliveries of one handler in one transaction, in their order; returns the outcome of each.

    For an ordered handler, no other thread may admit deliveries of the same queue meanwhile, and after an error the same
    deliveries must be admitted again before any later one of that queue.

    Args:
        shed: why load shedding drops them; "" stores them to be handled.

    Raises:
        DatabaseUnavailable: the database does not answer, or a delivery of an ordered handler is being handled, or refused by
            the database. Nothing was decided.
        ConcurrentDuplicate, django.db.Error: one of several deliveries is being handled, or refused by the database; admit them
            in smaller parts. A single delivery of an unordered handler is refused even without its values.
    """
    try:
        became = committed(handler.using, _store, handler, arrivals, shed, options.DUPLICATE_TIMEOUT)
    except DatabaseUnavailable:
        raise
    except ConcurrentDuplicate as error:
        if handler.ordered:
            reason = f"a transaction has had one of these messages in hand for over {options.DUPLICATE_TIMEOUT}"
            raise DatabaseUnavailable(reason) from error
        if len(arrivals) > 1:
            raise
        in_hand.remember_elsewhere(arrivals[0].row, options.DUPLICATE_TIMEOUT)
        return [Outcome.DEFERRED]
    except DatabaseError as error:
        if len(arrivals) > 1:
            raise
        return _without_values(handler, arrivals[0], options, error)
    outcomes = [admitted(handler, arrival, one, shed) for arrival, one in zip(arrivals, became, strict=True)]
    if shedder := shedder_of(handler):
        shedder.dropped(outcomes.count(Outcome.SHED))
    return outcomes


def hand_over(handler: Handler, *arrivals: Arrival) -> None:
    """Store deliveries without a broker, in their order, inside the caller's transaction. The runner runs them.

    Raises:
        ConcurrentDuplicate: another transaction is handling one of these messages; roll back and hand them over again.
    """
    with lock_timeout(handler.using, _HAND_OVER_WAIT):
        became = fresh.admit(handler.using, [_insertion(handler, arrival) for arrival in arrivals])
    if None in became:
        raise ConcurrentDuplicate

    def announce() -> None:
        for arrival, one in zip(arrivals, became, strict=True):
            admitted(handler, arrival, one)

    transaction.on_commit(announce, using=handler.using, robust=True)


def _store(alias: str, handler: Handler, arrivals: Sequence[Arrival], shed: str, longest_wait: timedelta) -> list[Admitted]:
    # The deliveries of an ordered handler are inserted as they came; one transaction at a time inserts those of a queue.
    order = range(len(arrivals)) if handler.ordered else in_lock_order([arrival.row for arrival in arrivals])
    with ordering.deciding(alias, longest_wait):
        stored = fresh.admit(alias, [_insertion(handler, arrivals[index], shed) for index in order])
    by_index = dict(zip(order, stored, strict=True))
    return [by_index[index] for index in range(len(arrivals))]


def _insertion(handler: Handler, arrival: Arrival, shed: str = "") -> Insertion:
    row, refused, why = arrival.row, arrival.refused, arrival.refused or shed
    state = State.DEAD if refused else State.SHED if shed else State.RECEIVED
    # A dead letter keeps its place in the order until an operator decides, unless the handler skips it.
    ordered = bool(handler.ordered and row.key) and not (refused and handler.skips_dead)
    values: Values = {
        "due_after": None if why else 0.0,
        "ordered": ordered,
        "quarantined": arrival.quarantined,
        "last_error": why and printable(why, ERROR_LENGTH),
        "error_class": REFUSED if refused else "",
    }
    return Insertion(row, State.WAITING if ordered and state is State.RECEIVED else state, values)


def _without_values(handler: Handler, arrival: Arrival, options: InboxOptions, error: DatabaseError) -> list[Outcome]:
    """Store a delivery whose values the database refuses as a dead letter with its body only."""
    body_only = replace(arrival, row=undecoded(arrival.row), refused=unfit(error))
    if arrival.refused == body_only.refused:
        if handler.ordered:
            raise DatabaseUnavailable(f"a delivery cannot be stored, and nothing goes past it: {describe(error)}") from error
        raise error
    return admit(handler, [body_only], options)
