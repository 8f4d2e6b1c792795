"""Parking: a delivery that cannot be decided now is stored as it came and acknowledged. The runner identifies it later.

One kind is a concurrent duplicate: its message is being handled, and the outcome is unknown until the handler ends. Many
unacknowledged duplicates would fill the prefetch window of their queue; returned to the broker, each would be redelivered at
once, in a loop. The other kind is a delivery that only its body identifies, if the broker has made it before, because an
attempt is counted before its body is read; or if a relay hands it over, because a handler's `biz_id` would hold up its pass.

A parked delivery has a biz-id that is a digest of all of it, so that copies share a row. When it is due, it is read, and its
row becomes that of its message, which is run by the same claim. If the message has a row, the delivery is counted on that one.

`open_claimed` also opens the other stored messages.
"""

import random
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial

from django.db import DatabaseError

from exactly_once.process.clock import utcnow
from exactly_once.process.logs import escaping_logger
from exactly_once.wire.body import Undecodable
from exactly_once.wire.envelope import Envelope
from exactly_once.wire.text import describe
from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler
from inbox.models import InboxMessage
from inbox.receiving.in_hand import in_hand
from inbox.receiving.outcomes import admitted, fail_exhausted, fail_stored, refusal, unfit
from inbox.receiving.reading import (
    is_parked,
    message_for,
    parked_row,
    read_body,
    read_parked,
    stored_arrival,
    why_undecodable,
)
from inbox.states import Outcome, State
from inbox.store import arrivals, claims, duplicates, message_rows
from inbox.store.dialect import SHORTEST_LOCK_WAIT
from inbox.store.message_rows import ConcurrentDuplicate, Earlier, Failure, NewRow
from inbox.transactions.arrival import Arrival
from inbox.transactions.running import committed

logger = escaping_logger(__name__)

_SHORTEST_DEFERRAL, _LONGEST_DEFERRAL = timedelta(seconds=1), timedelta(seconds=30)


def park(handler: Handler, arrival: Arrival, options: InboxOptions) -> Outcome:
    """Park a concurrent duplicate; returns its outcome. DEFERRED: it cannot be stored now.

    Raises:
        DatabaseUnavailable: the database does not answer; nothing was decided.
        ConcurrentDuplicate: another transaction is storing it.
    """
    row, alias = parked_row(handler, arrival.envelope, redelivered=arrival.row.redelivered), handler.using
    if committed(alias, arrivals.store_due, row, options.DUPLICATE_TIMEOUT, after=_SHORTEST_DEFERRAL):
        in_hand.after(arrival.row, partial(_make_due, handler, row))
        return Outcome.STORED
    # Another copy of it has been stored.
    return admitted(handler, arrival, committed(alias, duplicates.count_duplicate, row))


def open_claimed(handler: Handler, stored: InboxMessage, options: InboxOptions) -> Arrival | Outcome:
    """A claimed message that can be run; the outcome of one that cannot.

    It cannot be run if its attempts are used up, it cannot be read, or its message has another row or is being handled.

    Raises:
        DatabaseUnavailable: the database does not answer.
    """
    # Under a lease another call might repeat an effect.
    if exhausted := fail_exhausted(handler, stored, options, grace=0 if handler.lease or not handler.kind.is_called else 1):
        return exhausted
    if is_parked(stored.biz_id):
        return _identify_parked(handler, stored, options)
    arrival = stored_arrival(handler, stored)
    try:
        arrival.message = message_for(arrival, options)
    except Undecodable as error:
        return _refuse(handler, stored, arrival.envelope, why_undecodable(error), options)
    return arrival


def open_first(handler: Handler, stored: InboxMessage, options: InboxOptions) -> Arrival | None:
    """As `open_claimed`, inside a transaction, for a message that is called for the first time. None: that takes more."""
    if stored.attempts > 1 or is_parked(stored.biz_id):
        return None
    arrival = stored_arrival(handler, stored)
    with suppress(Exception):  # the same one is raised, or stored, if it is opened by itself
        arrival.message = message_for(arrival, options)
    return arrival if arrival.message else None


def _refuse(handler: Handler, stored: InboxMessage, envelope: Envelope, why: str, options: InboxOptions) -> Outcome:
    """Dead-letter a message that cannot be read."""
    # If it was stored unread, its biz-id comes from its headers. An unreadable message must not block that biz-id.
    became: Outcome | None = None
    if stored.state == State.RECEIVED and stored.attempts == 1 and not stored.ordered and stored.replaces_id is None:
        became = _identify_unread(handler, stored, read_body(handler, envelope, options, refused=why, redelivered=True))
    return became or fail_stored(handler, stored, Failure(error=why, retry_after=None, attempts=stored.attempts - 1))


def _identify_parked(handler: Handler, stored: InboxMessage, options: InboxOptions) -> Arrival | Outcome:
    """Read a claimed delivery that was parked, see `_identify_unread`; returns it, if it is to be run.

    Raises:
        Unidentifiable: its body cannot be read now.
        DatabaseUnavailable: the database does not answer.
    """
    arrival = read_parked(handler, stored, options)
    # The store of leases has not been asked about it, and may have lost the record of an earlier delivery.
    row = replace(arrival.row, redelivered=True)
    return _identify_unread(handler, stored, arrival) or replace(arrival, row=row, message=None, stored=stored)


def _identify_unread(handler: Handler, stored: InboxMessage, arrival: Arrival) -> Outcome | None:
    """Make the claimed row of a parked or unread delivery the row of its message. None: it is to be run.

    Otherwise its outcome: it is refused; a duplicate, whose row is deleted; or deferred, because its message is being handled.

    Raises:
        DatabaseUnavailable: the database does not answer.
    """
    earlier: Earlier | None = None
    if arrival.row.biz_id == stored.biz_id:  # refused again
        return fail_stored(handler, stored, refusal(arrival))
    try:
        if not in_hand.holds(arrival.row):
            if committed(handler.using, claims.identify, stored, arrival.row, SHORTEST_LOCK_WAIT):
                return fail_stored(handler, stored, refusal(arrival)) if arrival.refused else None
            earlier = committed(handler.using, claims.count_parked, stored, arrival.row, SHORTEST_LOCK_WAIT)
    except ConcurrentDuplicate:
        pass
    except DatabaseError as error:
        # The values that were read cause the error; the new row has only the body.
        row, refused = message_rows.undecoded(arrival.row), unfit(error)
        if arrival.refused == refused:
            raise
        return _identify_unread(handler, stored, replace(arrival, row=row, refused=refused))
    became = admitted(handler, arrival, earlier)
    return _defer(handler, stored) if became is Outcome.DEFERRED else became


def _defer(handler: Handler, stored: InboxMessage) -> Outcome:
    """Its message is still being handled: try again after about as long as it has waited already."""
    waited = min(max(utcnow() - stored.received_at, _SHORTEST_DEFERRAL), _LONGEST_DEFERRAL)
    committed(handler.using, claims.give_back, stored, waited * random.uniform(0.7, 1))
    return Outcome.STORED


def _make_due(handler: Handler, row: NewRow) -> None:
    try:
        claims.make_parked_due(handler.using, row)
    except Exception as error:  # noqa: BLE001 - it is due soon in any case
        logger.debug("%s: the duplicate %s is admitted when it is due: %s", handler.name, row.biz_id, describe(error))
