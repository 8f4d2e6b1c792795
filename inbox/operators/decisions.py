"""Operators' decisions about one message: retry, override, skip, replace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.db import OperationalError
from django.db.models import F

from exactly_once.sql.connections import lock_timeout
from exactly_once.sql.faults import is_collision
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.text import ERROR_LENGTH, printable
from inbox.errors import NotEditable
from inbox.models import InboxMessage, State
from inbox.store.dialect import LONGEST_LOCK_WAIT
from inbox.store.inserting import Insertion, insert_one
from inbox.store.ordering import deciding, hold_gates, is_head, promote_next
from inbox.store.rows import ConcurrentDuplicate, NewRow
from inbox.store.trail import record

OPERATORS_WAIT = timedelta(seconds=10)
ROW_LOCKED = "Row {} is locked by another transaction, which did not end in time. Nothing was changed. Try again later."

RETRYABLE = (State.DEAD, State.RETRYING, State.RECEIVED, State.RUNNING)
SKIPPABLE = (State.DEAD, State.RETRYING, State.RECEIVED, State.RUNNING, State.WAITING)
"""A running message only after its lease has ended."""
TRIED_AGAIN: Mapping[str, Any] = {
    "state": State.RETRYING,
    "attempts": 0,
    "fence": F("fence") + 1,
    "next_attempt_at": DatabaseTime(),
    "settled_at": None,
}


def retry(alias: str, row: int, *, reason: str = "", after: timedelta = timedelta()) -> bool:
    """dead | retrying | received → retrying, due `after` a delay, with a full set of attempts. False: in none of these states.

    running, past its lease → running, due now; its owner can settle nothing. False also if the maximum message age has
    refused it, see `override_maximum_age`. While a handler is running the message, this waits for up to ten seconds. In an
    order the message is `waiting` while another precedes it.

    Args:
        reason: for the trail: the operator.
    """
    written = {**TRIED_AGAIN, "next_attempt_at": DatabaseTime(after)} if after else TRIED_AGAIN
    return _decide(alias, row, RETRYABLE, reason, quarantined=False, written=written)


def override_maximum_age(alias: str, row: int, *, reason: str = "") -> bool:
    """dead, refused by the maximum message age → retrying, due now. False: it is in another state.

    The operator asserts that it has not been handled before. From then on it is a normal message, and further copies are
    duplicates.

    Args:
        reason: for the trail: the operator and the reason.
    """
    recorded = "; ".join(filter(None, ("the maximum message age was overridden", reason)))
    return _decide(alias, row, [State.DEAD], recorded, quarantined=True, written={**TRIED_AGAIN, "quarantined": False})


def skip(alias: str, row: int, reason: str, *, by: str = "") -> bool:
    """dead | retrying | received | waiting → skipped: its effect will not happen. False: it is in none of these states.

    running, past its lease → skipped; its owner can settle nothing. An external lease may have been extended without a
    change of the row: see `inbox.leases.operating`.

    While a handler is running the message, this waits for up to ten seconds. In an order the next message is promoted.

    Args:
        reason: stored in the row and in the trail.
        by: for the trail: the operator.
    """
    return _decide(alias, row, SKIPPABLE, "; ".join(filter(None, (reason, by))), written=skipped(reason))


def replace(alias: str, row: int, corrected: NewRow, *, by: str = "") -> int | None:
    """dead → skipped, and ∅ → received, due now, for the row that replaces it; its id. None: it is no longer dead.

    Also None if the maximum message age has refused it, see `override_maximum_age`. An ordered message's new row has the
    old row's place in the order; it is `waiting` while an earlier message of its key is open.

    Args:
        corrected: the message with its new payload and a biz-id that no other row has.
        by: the operator, for the reason of the old row and for the trail of both.

    Raises:
        NotEditable: another transaction has locked the row and did not end in time, or another row has the new biz-id.
    """
    try:
        with deciding(alias), lock_timeout(alias, OPERATORS_WAIT):
            found = InboxMessage.objects.using(alias).filter(pk=row, state=State.DEAD, quarantined=False)
            replaced = found.select_for_update().only("handler", "key", "ordered", "place", "biz_id", "fence").first()
            return None if replaced is None else _replace(alias, replaced, corrected, by)
    except ConcurrentDuplicate as error:
        raise NotEditable(
            f"Another transaction is storing a message with the biz-id {corrected.biz_id}, which the corrected message would "
            "have. Nothing was changed. Try again later."
        ) from error
    except OperationalError as error:
        if is_collision(error):
            raise NotEditable(ROW_LOCKED.format(row)) from error
        raise


def _replace(alias: str, replaced: InboxMessage, corrected: NewRow, by: str) -> int:
    place, waits = replaced.place or replaced.pk, False
    if replaced.ordered:
        hold_gates(alias, replaced.handler, [replaced.key])
        waits = not is_head(alias, replaced.handler, replaced.key, place)
    insertion = Insertion(
        row=corrected,
        state=State.WAITING if waits else State.RECEIVED,
        due_after=0.0,
        ordered=replaced.ordered,
        place=place if replaced.ordered else None,
        replaces_id=replaced.pk,
        # Fencing tokens of the corrected message are greater than those of this one.
        fence=replaced.fence,
    )
    inserted = insert_one(alias, insertion, LONGEST_LOCK_WAIT)
    if inserted is None:
        raise NotEditable(
            f"Another row of this handler has the biz-id {corrected.biz_id}, which the corrected message would have. "
            "Nothing was changed. Compare the two messages, and skip this one if the other has the same effect."
        )
    (row,) = inserted.rows
    reason = "; ".join(filter(None, (f"replaced by row {row} (biz-id {corrected.biz_id})", by)))
    InboxMessage.objects.using(alias).filter(pk=replaced.pk).update(**skipped(reason))
    record(alias, [replaced.pk], was=State.DEAD, reason=reason)
    origin = f"replaces row {replaced.pk} (biz-id {replaced.biz_id}) with another payload"
    record(alias, [row], was="", reason="; ".join(filter(None, (origin, by))))
    return row


def skipped(reason: str) -> Mapping[str, Any]:
    return {
        "state": State.SKIPPED,
        "last_error": printable(f"skipped: {reason}", ERROR_LENGTH),
        "next_attempt_at": None,
        "settled_at": DatabaseTime(),
    }


def _decide(alias: str, row: int, allowed: Sequence[State], reason: str, *, written: Mapping[str, Any], **only: Any) -> bool:
    try:
        with deciding(alias), lock_timeout(alias, OPERATORS_WAIT):
            found = InboxMessage.objects.using(alias).filter(pk=row, state__in=allowed, **only)
            found = found.exclude(state=State.RUNNING, next_attempt_at__gt=DatabaseTime())
            message = found.select_for_update().only("handler", "key", "ordered", "place", "state").first()
            if message is not None:
                _write(alias, message, written)
                record(alias, [row], was=message.state, reason=reason)
            return message is not None
    except OperationalError as error:
        if is_collision(error):
            return False
        raise


def _write(alias: str, message: InboxMessage, written: Mapping[str, Any]) -> None:
    row = InboxMessage.objects.using(alias).filter(pk=message.pk)
    if message.state == State.RUNNING:
        # Only its lease store knows whether it has been run, so it stays running until its next owner has the lease.
        state = State.RUNNING if written["state"] == State.RETRYING else written["state"]
        written = {**written, "state": state}
    if not message.ordered or message.state == State.WAITING:
        # The holder of the gate may be waiting for a waiting row, which is not the head.
        row.update(**written)
        return
    hold_gates(alias, message.handler, [message.key])
    if written["state"] == State.RETRYING and not is_head(alias, message.handler, message.key, message.place or message.pk):
        written = {**written, "state": State.WAITING, "next_attempt_at": None}
    row.update(**written)
    promote_next(alias, message.handler, message.key)
