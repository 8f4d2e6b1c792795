"""Operators' corrections of a dead message's payload. The corrected message is a new row, run like any stored message.

The first row stays, as `skipped`: later deliveries of the published message still match its biz-id and its digest.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django.db import OperationalError
from django.db.models import F

from exactly_once.console.display import as_editable, difference
from exactly_once.failures import REFUSED
from exactly_once.sql.days import LIVE
from exactly_once.sql.faults import is_collision
from exactly_once.wire.body import Undecodable, decode_payload
from exactly_once.wire.envelope import COMPRESSION, JSON, Envelope, compression_of, opened
from exactly_once.wire.formats import CELERY_TOPICS
from exactly_once.wire.text import why_unfit
from inbox.conf import InboxOptions, inbox_options
from inbox.errors import NotEditable
from inbox.handlers.handler import Handler
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.operators import decisions
from inbox.receiving.reading import (
    identify,
    is_parked,
    message_of,
    row_of,
    stored_envelope,
    why_undecodable,
)
from inbox.states import RETRY, State
from inbox.store import ordering, receipts
from inbox.store.arrivals import Insertion, admit, insert_one
from inbox.store.dialect import LONGEST_LOCK_WAIT
from inbox.store.message_rows import (
    ConcurrentDuplicate,
    NewRow,
    business_id,
    conflicting_name,
    edited_name,
)
from inbox.store.trail_entries import record

ROW_LOCKED = "Row {} is locked by another transaction, which did not end in time. Nothing was changed. Try again later."
_STEPS_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A correction that may be stored.

    Attributes:
        row: the message with its new payload, under the new row's biz-id.
        changes: see `difference`.
    """

    row: NewRow
    changes: Sequence[str]


def editable(stored: InboxMessage) -> str:
    """The payload of a dead message as JSON for editing; its body as text if it is not JSON.

    Raises:
        NotEditable: the message cannot be corrected, for this reason.
    """
    if reason := _why_not(stored):
        raise NotEditable(reason)
    try:
        envelope, options = stored_envelope(stored), inbox_options()
        limit = options.BODY_LIMIT_BYTES
        return as_editable(
            decode_payload(envelope.body, envelope.content_type, compression=compression_of(envelope), limit=limit)
        )
    except Undecodable:
        return bytes(stored.body).decode(errors="replace")
    except RecursionError as error:
        raise NotEditable("Its payload is nested too deeply to be edited.") from error


def correct(stored: InboxMessage, text: str) -> Correction:
    """The correction of a dead message whose new payload is the JSON in `text`.

    Raises:
        NotEditable: the message cannot be corrected, or not with this payload, for this reason.
    """
    before, options = editable(stored), inbox_options()
    payload, after = _read(text, options)
    if before == after:
        raise NotEditable("The payload is unchanged. Retry the message instead.")
    known, handler = stored_envelope(stored), registry.get(stored.handler)
    assert handler is not None  # noqa: S101 - see _why_not
    headers = {name: value for name, value in known.headers.items() if name != COMPRESSION}
    try:
        given = known._replace(body=json.dumps(payload, separators=(",", ":")).encode(), headers=headers)
        envelope = opened(given, options.BODY_LIMIT_BYTES)
        biz_id = _biz_id(handler, stored, envelope, options)
    except Undecodable as error:
        raise NotEditable(why_undecodable(error)) from error
    row = replace(row_of(handler, envelope, biz_id=biz_id), topic=envelope.topic)
    return Correction(row=row, changes=difference(before, after))


@decisions.again_if_settled
def replace_message(alias: str, pk: int, text: str, *, by: str) -> int | None:
    """dead → skipped, and ∅ → received, due now, for a row with the payload in `text`; its number. None: it is no longer dead.

    Also None if the maximum message age has refused it. An ordered message's new row has the old row's place in the order; it
    is `waiting` while an earlier message of its key is open.

    Args:
        by: the operator, for the reason of the old row and for the trail of both.

    Raises:
        NotEditable: see `correct`; or another transaction has locked the row and did not end in time, or another row has the
            new biz-id.
    """
    stored = InboxMessage.objects.using(alias).filter(pk=pk, day=LIVE, state=State.DEAD).first()
    if stored is None:
        return None
    corrected = correct(stored, text).row
    with locked_is_not_editable(pk), decisions.waiting_for_locks(alias):
        found = InboxMessage.objects.using(alias).filter(pk=pk, day=LIVE, state=State.DEAD, **RETRY.needs)
        replaced = found.select_for_update().only("handler", "key", "ordered", "place", "biz_id", "fence").first()
        return None if replaced is None else _replace(alias, replaced, corrected, by)


@contextmanager
def locked_is_not_editable(pk: int) -> Iterator[None]:
    """Another transaction that has locked the row, or stores a message with its new biz-id, is a reason not to edit it."""
    try:
        yield
    except (ConcurrentDuplicate, OperationalError) as error:
        if isinstance(error, OperationalError) and not is_collision(error):
            raise
        raise NotEditable(ROW_LOCKED.format(pk)) from error


def _replace(alias: str, replaced: InboxMessage, corrected: NewRow, by: str) -> int:
    place, waits = replaced.place or replaced.pk, False
    if replaced.ordered:
        ordering.hold_gates(alias, replaced.handler, [replaced.key])
        waits = not ordering.is_head(alias, replaced.handler, replaced.key, place)
    row = insert_one(
        alias,
        corrected,
        State.WAITING if waits else State.RECEIVED,
        LONGEST_LOCK_WAIT,
        recorded=False,
        due_after=0.0,
        ordered=replaced.ordered,
        place=place if replaced.ordered else None,
        replaces_id=replaced.pk,
        # Fencing tokens of the corrected message are greater than those of this one.
        fence=replaced.fence,
    )
    if row is None:
        raise NotEditable(
            f"Another row of this handler has the biz-id {corrected.biz_id}, which the corrected message would have. "
            "Nothing was changed. Compare the two messages, and skip this one if the other has the same effect."
        )
    reason = "; ".join(filter(None, (f"replaced by row {row} (biz-id {corrected.biz_id})", by)))
    InboxMessage.objects.using(alias).filter(pk=replaced.pk, day=LIVE).update(**decisions.skipped(reason))
    record(alias, [replaced.pk], was=State.DEAD, reason=reason)
    origin = f"replaces row {replaced.pk} (biz-id {replaced.biz_id}) with another payload"
    record(alias, [row], was="", reason="; ".join(filter(None, (origin, by))))
    return row


def conflict_token(stored: InboxMessage) -> str:
    """Identifies the latest duplicate with other content of this row."""
    named = f"{stored.pk} {stored.conflicting_at} {stored.conflicting_id}"
    return hashlib.sha256(named.encode(errors="replace")).hexdigest()


@decisions.again_if_settled
def run_conflicting(alias: str, pk: int, *, confirmed: Collection[str], by: str) -> bool:
    """∅ → received, due now, for the latest duplicate with other content of this row. False: none is stored, or it was run.

    The same content is run once, however often it is delivered. Its handler gets it with the biz-id of the row. If it was run
    before, this delivery is counted as a duplicate of that run.

    Args:
        confirmed: the `conflict_token` of each row when the operator was asked.
        by: the operator and the reason, for the trail.

    Raises:
        NotEditable: it cannot be run as its own message, or is another one by now, for this reason.
    """
    with locked_is_not_editable(pk), decisions.waiting_for_locks(alias):
        found = receipts.message(alias, pk).filter(conflicting_attributes__isnull=False)
        first = found.select_for_update().first()
        if first is None:
            return False
        if conflict_token(first) not in confirmed:
            raise NotEditable(
                "Another duplicate with different content has arrived meanwhile. Compare again, and confirm again."
            )
        row = _conflicting_row(first)
        if reason := _why_not_by_itself(row):
            raise NotEditable(reason)
        handler = registry.get(row.handler)
        in_order = bool(handler and handler.ordered and row.key)
        state = State.WAITING if in_order else State.RECEIVED
        (became,) = admit(alias, [Insertion(row, state, {"due_after": 0.0, "ordered": in_order})])
        if became is None:
            raise NotEditable(ROW_LOCKED.format(pk))
        # Its delivery is a row now, or counted with one. If its cause was counted, it stays a duplicate, too.
        counted = int(first.conflicting_id != first.message_id)
        receipts.message(alias, pk).update(
            conflicting_attributes=None, conflicts=F("conflicts") - 1, duplicates=F("duplicates") - counted
        )
        if not isinstance(became, State):
            return False
        new = receipts.open_message(alias, row).only("pk").get()
        record(alias, [new.pk], was="", reason=f"has other content than row {pk} under its biz-id; {by}")
        return True


def _conflicting_row(stored: InboxMessage) -> NewRow:
    """The latest conflicting duplicate of a row, under a biz-id of its own, which the same content gets again."""
    body = bytes(stored.conflicting_body or b"")
    digest = hashlib.sha256(body).hexdigest()
    attributes: dict[str, Any] = {**(stored.conflicting_attributes or {})}
    created_at = attributes.pop("created_at")
    return NewRow(
        handler=stored.handler,
        topic=stored.topic,
        biz_id=conflicting_name(digest, stored.biz_id),
        message_id=stored.conflicting_id,
        body=body,
        digest=digest,
        created_at=datetime.fromisoformat(created_at) if created_at else None,
        **attributes,
    )


def _why_not_by_itself(row: NewRow) -> str:
    handler = registry.get(row.handler)
    if handler is None:
        return f"This process has no handler {row.handler!r}, which would run it."
    if handler.kind.collects_for:
        return "A run of a join has one message of each topic. Publish it with the run id of another run."
    if reason := why_unfit(row.biz_id):
        return f"It would be stored under the biz-id {row.biz_id}, which is invalid: {reason}."
    return ""


def _why_not(stored: InboxMessage) -> str:
    """Why the message cannot be corrected with any payload; "" if it can."""
    if stored.state != State.DEAD:
        return f"Its state is {stored.get_state_display().lower()}; only a dead message can be corrected."
    if not RETRY.allows(stored):
        return "It is in quarantine: the inbox no longer knows whether it was handled before. Override the maximum age first."
    if stored.topic.startswith(CELERY_TOPICS):
        return (
            "It is a Celery task, whose arguments cannot be corrected here: the copy would be a duplicate of this message. "
            "Call the task with the right arguments and another biz-id, then skip this message."
        )
    if is_parked(stored.biz_id) and stored.error_class != REFUSED:
        return "Its body has not been decoded yet. Retry it unchanged; if it cannot be decoded then, it can be corrected."
    return _why_not_by_its_handler(stored) or _why_not_after_steps(stored)


def _why_not_by_its_handler(stored: InboxMessage) -> str:
    handler = registry.get(stored.handler)
    if handler is None:
        return f"This process has no handler {stored.handler!r}, which is needed to identify the corrected message."
    if handler.kind.all_of:
        return (
            "It is the row of a join's run, which has no payload of its own, and another row would not belong to the run. Use "
            "the page of the run to enter missing messages, to wait longer, or to start without them."
        )
    return ""


def _why_not_after_steps(stored: InboxMessage) -> str:
    steps = ", ".join(stored.steps.order_by("pk").values_list("name", flat=True)[:_STEPS_NAMED])
    return steps and (
        f"Its steps ({steps}) were taken with the present payload and would not be taken again. Retry it unchanged, or skip "
        "it and publish another message for the remaining steps."
    )


def _read(text: str, options: InboxOptions) -> tuple[Any, str]:
    """The payload in `text`, and its text form for comparison."""
    try:
        payload = decode_payload(text.encode("utf-8", "surrogatepass"), JSON, limit=options.BODY_LIMIT_BYTES)
        json.dumps(payload, allow_nan=False)
        return payload, as_editable(payload)
    except Undecodable as error:
        if isinstance(error.__cause__, json.JSONDecodeError):
            found = error.__cause__
            raise NotEditable(f"Line {found.lineno}, column {found.colno}: the text is not JSON ({found.msg}).") from error
        raise NotEditable(why_undecodable(error)) from error
    except ValueError as error:
        raise NotEditable("NaN and Infinity are not JSON. Use null or a string, whichever the handler accepts.") from error
    except RecursionError as error:
        raise NotEditable("The payload is nested too deeply.") from error


def _biz_id(handler: Handler, stored: InboxMessage, corrected: Envelope, options: InboxOptions) -> str:
    """The biz-id of the corrected message's row: a derived name if its own biz-id is the same as before, else its own.

    Raises:
        Undecodable: the corrected message could not be handled, see `message_of` and `identify`.
        NotEditable: another message has its biz-id.
    """
    known = business_id(stored.biz_id)
    message = message_of(handler, corrected, options, needs_id=False, is_bounded=False)
    found = identify(handler, message, is_bounded=False) if handler.biz_id or is_parked(known) else known
    if found and found != known and (is_parked(known) or _identified_alike(handler, stored, known, options)):
        taken = receipts.named(handler.using, handler.name, stored.topic, found)
        if (other := taken.only("state").first()) is not None:
            raise NotEditable(
                f"The corrected message would have the biz-id {found}, which the message in row {other.pk} "
                f"({other.get_state_display().lower()}) already has. Skip this message if that one has the same effect."
            )
        return found
    name = edited_name(stored.pk, known)
    if reason := why_unfit(name):
        raise NotEditable(f"The corrected message would be stored under the biz-id {name}, which is invalid: {reason}.")
    return name


def _identified_alike(handler: Handler, stored: InboxMessage, known: str, options: InboxOptions) -> bool:
    """Does the handler's `biz_id` return the stored biz-id for the old payload? True also if that cannot be decoded.

    If not, `biz_id` needs data that a row does not have, and its result cannot be used here.
    """
    try:
        envelope = opened(stored_envelope(stored), options.BODY_LIMIT_BYTES)
        message = message_of(handler, envelope, options, needs_id=False, is_bounded=False)
        return identify(handler, message, is_bounded=False) == known
    except Undecodable:
        return True
