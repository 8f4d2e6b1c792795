"""Deliveries that are stored before their outcome can be decided.

One kind is a concurrent duplicate: its message is being handled, and the outcome is unknown until the handler ends. Many
unacknowledged duplicates would fill the prefetch window of their queue; returned to the broker, each would be redelivered at
once, in a loop. The other kind is a delivery that the broker has made before and that only its body identifies: an attempt is
counted before its body is read.

Both are stored under a provisional biz-id and acknowledged. The runner decides them later.

Some redeliveries must be read before they can be stored. For these, a row under the provisional biz-id only counts how often
reading has begun; it is deleted when the body has been read.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import defaultdict
from dataclasses import replace
from datetime import timedelta
from functools import partial

from django.db import DatabaseError

from exactly_once.process.clock import utcnow
from exactly_once.wire.envelope import Envelope
from exactly_once.wire.text import describe
from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler
from inbox.models import InboxMessage
from inbox.receiving.in_hand import in_hand
from inbox.receiving.outcomes import Received, announce_duplicate, fail_stored, refusal
from inbox.receiving.reading import Arrival, Unidentifiable, is_undecided, is_undecided_redelivery, read, undecided_row
from inbox.store import arrivals, claims, rows, undecided
from inbox.store.rows import ConcurrentDuplicate, NewRow
from inbox.transactions.persistence import DatabaseUnavailable, committed

logger = logging.getLogger(__name__)

_RUN_CHECK_TIMEOUT = timedelta(milliseconds=10)
"""How long the runner waits for a row lock before it assumes that another process is handling the message."""
_ENDED_PROCESS = "Reading its body has ended the process or failed {attempts} times, so it is not read again."
_reading_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
"""By database. Reading is serialized, because a delivery read concurrently with one that ends the process would be counted."""
_SHORTEST_DEFERRAL, _LONGEST_DEFERRAL = timedelta(seconds=1), timedelta(seconds=30)


def store_undecided(handler: Handler, arrival: Arrival, options: InboxOptions, *, redelivered: bool) -> Received:
    """Store a concurrent duplicate; returns its outcome. DEFERRED: it cannot be stored now.

    Raises:
        DatabaseUnavailable: the database does not answer; nothing was decided.
    """
    row = undecided_row(handler, arrival.envelope, redelivered=redelivered)
    store = partial(arrivals.store_due, handler.using, row, options.DUPLICATE_TIMEOUT, after=_SHORTEST_DEFERRAL)
    try:
        stored = committed(store, handler.using)
    except ConcurrentDuplicate:
        return Received.DEFERRED
    if stored:
        in_hand.after(arrival.row, partial(_decide_now, handler, row))
        return Received.STORED
    # Another copy of it has been stored.
    earlier = committed(lambda: arrivals.count_duplicate(handler.using, row, redelivered=redelivered), handler.using)
    if earlier is None:
        return Received.DEFERRED
    announce_duplicate(handler, arrival.row, earlier)
    return Received.DUPLICATE


def read_counted(handler: Handler, envelope: Envelope, options: InboxOptions) -> Arrival:
    """Read a redelivery that must be read before it is stored, and count the reading first.

    Raises:
        DatabaseUnavailable: the database does not answer; nothing was decided.
    """
    row = undecided_row(handler, envelope, redelivered=True)
    with _reading_locks[handler.using]:
        begun = _begin_reading(handler, row, options)
        refused = _ENDED_PROCESS.format(attempts=begun - 1) if begun > handler.retry.over(options.retry).max_attempts else ""
        is_counted = bool(begun)
        try:
            return read(handler, envelope, options, refused=refused)
        except Unidentifiable:
            is_counted = False  # it stays, so that the delivery becomes a dead letter at last
            raise
        finally:
            if is_counted:
                committed(lambda: undecided.end_reading(handler.using, row), handler.using)


def _begin_reading(handler: Handler, row: NewRow, options: InboxOptions) -> int:
    """How often reading this delivery has begun, including now; 0 if that cannot be counted."""
    for counted in (row, replace(rows.undecoded(row), biz_id=row.biz_id)):
        try:
            return committed(partial(undecided.begin_reading, handler.using, counted, options.DUPLICATE_TIMEOUT), handler.using)
        except ConcurrentDuplicate:
            break
        except DatabaseError as error:
            # Its values cause the error; the second row has only the body.
            logger.debug("%s: a delivery cannot be stored with its headers: %s", handler.name, describe(error))
    return 0


def decide(handler: Handler, stored: InboxMessage, arrival: Arrival) -> Received | None:
    """Assign its biz-id to a claimed delivery that was stored unread, or merge it into the row that has it; its outcome.

    None: this is now the row of its message, to be run.
    """
    assign = partial(undecided.assign_biz_id, handler.using, stored, arrival.row, _RUN_CHECK_TIMEOUT)
    try:
        if in_hand.holds(arrival.row):
            return _defer(handler, stored)
        assigned = committed(assign, handler.using)
        if assigned is False:
            return _merge(handler, stored, arrival)
    except ConcurrentDuplicate:
        return _defer(handler, stored)
    except DatabaseUnavailable as outage:
        outage.refund = partial(claims.give_back, handler.using, stored)
        raise
    if assigned is None:
        return Received.STORED
    return fail_stored(handler, stored, refusal(arrival)) if arrival.refused else None


def _merge(handler: Handler, stored: InboxMessage, arrival: Arrival) -> Received:
    """Count it as a duplicate of its message's row.

    Raises:
        ConcurrentDuplicate: that row is being run.
    """
    # A row with a biz-id from its headers was stored unread, see `reading.read`.
    redelivered = is_undecided_redelivery(stored.biz_id) or not is_undecided(stored.biz_id)
    merge = partial(undecided.merge_undecided, handler.using, stored, arrival.row, _RUN_CHECK_TIMEOUT, redelivered=redelivered)
    earlier = committed(merge, handler.using)
    if earlier is None:
        return _defer(handler, stored)
    announce_duplicate(handler, arrival.row, earlier)
    return Received.DUPLICATE


def _defer(handler: Handler, stored: InboxMessage) -> Received:
    """Its message is still being handled: check again after about as long as it has waited already."""
    waited = min(max(utcnow() - stored.received_at, _SHORTEST_DEFERRAL), _LONGEST_DEFERRAL)
    delay = waited * random.uniform(0.7, 1)
    committed(lambda: claims.give_back(handler.using, stored, delay), handler.using)
    return Received.STORED


def _decide_now(handler: Handler, row: NewRow) -> None:
    try:
        undecided.decide_now(handler.using, row)
    except Exception as error:  # noqa: BLE001 - it is due soon in any case
        logger.debug("%s: the duplicate %s is decided when it is due: %s", handler.name, row.biz_id, describe(error))
