"""Reading a delivery: which message is it, and may it be handled?

This module does not use the database, but a handler's `biz_id` may. A delivery that cannot be read or identified, or is outside
the deduplication window, becomes a *refused* arrival with a reason; it is stored as a dead letter.

A body is read within the limit of `INBOX["BODY_LIMIT_BYTES"]`. The body of a redelivery is read only after an attempt was
counted, because reading it may have ended the process before: it is stored unread, or under a lease. See `parking`.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from django.db import connections

from exactly_once.conf.settings import redacted_error
from exactly_once.failures import REFUSED
from exactly_once.process.clock import utcnow
from exactly_once.sql.connections import drop_unusable_connections
from exactly_once.sql.faults import is_outage
from exactly_once.wire.body import OverLimit, Undecodable, decode_payload
from exactly_once.wire.durations import in_words
from exactly_once.wire.envelope import (
    COMPRESSION,
    JSON,
    Envelope,
    from_delivery,
    headers_as_json,
    is_structured,
    media_type,
    opened,
)
from exactly_once.wire.payloads import Misfit
from exactly_once.wire.text import describe
from inbox.conf import InboxOptions, inbox_options
from inbox.errors import HandlerTimeout
from inbox.handlers.handler import Handler
from inbox.handlers.message import FailedAttempt, Message
from inbox.handlers.timeouts import bounded
from inbox.models import InboxMessage
from inbox.store.dialect import is_reachable
from inbox.store.message_rows import CARRIED, DEATH, EDITED, PARKED, NewRow, business_id, carried_of, stored_row
from inbox.transactions.arrival import Arrival
from inbox.transactions.running import DatabaseUnavailable

_T = TypeVar("_T")

_LONGEST_READING = timedelta(seconds=10)
"""For a handler's `biz_id`, or its payload class, which looks at one message."""
_JSON = ("application/json", "text/json")
_PARKED_REDELIVERY, _PARKED_PAST = f"{PARKED}redelivery:", f"{PARKED}past:"

_OVERRIDE = "If you are sure that it has not been handled, override the maximum message age to run it; a retry does not run it."
_LIMIT = "To handle the message, raise INBOX['BODY_LIMIT_BYTES'] and retry it."


class Unidentifiable(DatabaseUnavailable):
    """This message cannot be identified now, others can. Its attempt counts."""


def read(
    handler: Handler,
    envelope: Envelope,
    options: InboxOptions,
    *,
    refused: str = "",
    redelivered: bool = False,
) -> Arrival:
    """Identify this delivery for `handler`, or state why it is `refused`. The body of a redelivery is not read.

    Raises:
        DatabaseUnavailable: see `identify`.
    """
    if redelivered and not refused:
        return read_unread(handler, envelope, options, redelivered=True)
    return read_body(handler, envelope, options, refused=refused, redelivered=redelivered)


def read_unread(
    handler: Handler, envelope: Envelope, options: InboxOptions, *, redelivered: bool = False, is_past: bool = False
) -> Arrival:
    """As `read`, without its body. If only that identifies it, it is to be stored as it came: see `parking`.

    Args:
        is_past: the handler is new, so that it cannot have handled the message before, however old that is.
    """
    refused = outside = ""
    try:
        if handler.ordered:
            # A structured event has its ordering key in its body, and needs it for its place in the order.
            envelope = opened(envelope, options.BODY_LIMIT_BYTES)
        if handler.biz_id is None and not is_structured(envelope):
            biz_id = _of_this_queue(handler, envelope.topic, _identified_by_headers(envelope))
            refused = outside = "" if is_past else outside_window(envelope, options)
            row = row_of(handler, envelope, biz_id=biz_id, redelivered=redelivered)
        else:
            row = parked_row(handler, envelope, redelivered=redelivered, is_past=is_past)
    except Undecodable as error:
        refused = why_undecodable(error)
        row = parked_row(handler, envelope, redelivered=redelivered, is_past=is_past, is_read=True)
    return Arrival(handler=handler, row=row, envelope=envelope, refused=refused, quarantined=bool(outside), unread=not refused)


def read_body(
    handler: Handler,
    envelope: Envelope,
    options: InboxOptions,
    *,
    refused: str = "",
    redelivered: bool = False,
    is_past: bool = False,
    needs_id: bool = True,
) -> Arrival:
    """As `read`, with its body. See `read_unread` for `is_past`."""
    biz_id = outside = ""
    message: Message | None = None
    if not refused:
        try:
            envelope = opened(envelope, options.BODY_LIMIT_BYTES)
            message = message_of(handler, envelope, options, needs_id=needs_id)
            biz_id = identify(handler, message) or _not_ours(parked_row(handler, envelope, redelivered=False).biz_id)
            refused = outside = "" if is_past else outside_window(envelope, options)
        except Undecodable as error:
            refused = why_undecodable(error)
    if biz_id:
        row = row_of(handler, envelope, biz_id=biz_id, redelivered=redelivered)
    else:
        row = parked_row(handler, envelope, redelivered=redelivered, is_past=is_past, is_read=True)
    if message is not None:
        # It is read again when it is run. Many are stored at once, so keeping them would take memory.
        if handler.is_stored_first:
            message = None
        elif message.biz_id != row.biz_id:
            message = replace(message, biz_id=row.biz_id)
    return Arrival(handler=handler, row=row, envelope=envelope, message=message, refused=refused, quarantined=bool(outside))


def why_undecodable(error: Undecodable) -> str:
    return f"{error} {_LIMIT}" if isinstance(error, OverLimit) else str(error)


def parked_row(
    handler: Handler, envelope: Envelope, *, redelivered: bool, is_past: bool = False, is_read: bool = False
) -> NewRow:
    """The row of a delivery that is stored as it came, because it is not known whether its message has been delivered before.

    It has all headers and attributes of the delivery. Its biz-id is a digest of the whole delivery, so that copies share a row.

    Args:
        is_read: reading it has failed, so it is stored as a dead letter.
    """
    headers = headers_as_json(dict(sorted(envelope.to_headers().items())))
    row = row_of(handler, envelope, biz_id=PARKED, redelivered=redelivered)
    digest = hashlib.sha256(f"{headers}\n{row.content_type}\n{row.digest}".encode()).hexdigest()
    prefix = _PARKED_PAST if is_past else _PARKED_REDELIVERY if redelivered and not is_read else PARKED
    return replace(row, headers=headers, biz_id=f"{prefix}{digest}")


def is_parked(biz_id: str) -> bool:
    return biz_id.startswith(PARKED)


def read_parked(handler: Handler, stored: InboxMessage, options: InboxOptions) -> Arrival:
    """As `read_body`, for a delivery that was stored as it came. If it was refused, an operator has retried it."""
    redelivered, is_past = (stored.biz_id.startswith(prefix) for prefix in (_PARKED_REDELIVERY, _PARKED_PAST))
    needs_id = stored.error_class != REFUSED
    return read_body(handler, stored_envelope(stored), options, redelivered=redelivered, is_past=is_past, needs_id=needs_id)


def identify(handler: Handler, message: Message, *, is_bounded: bool = True) -> str:
    """The biz-id of `message` in `handler`.

    Args:
        is_bounded: its `biz_id` must end in time, or ends this process if it cannot be interrupted: not while serving requests.

    Raises:
        Undecodable: it has another topic, or the handler's `biz_id` failed.
        DatabaseUnavailable: `biz_id` queries a database that does not answer.
        Unidentifiable: its query fails as in an outage, and all databases that this thread uses answer; or it takes too long.
    """
    if handler.biz_id is None:
        return _of_this_queue(handler, message.topic, message.biz_id)
    _of_this_queue(handler, message.topic, "")
    return _not_ours(_by_the_user(handler, "biz_id", partial(handler.identify, message), is_bounded=is_bounded))


def _by_the_user(handler: Handler, what: str, read: Callable[[], _T], *, is_bounded: bool) -> _T:
    """What the user's code for this option of the handler returns. Args, Raises: as `identify`."""
    for on_new_session in (False, True):
        try:
            with bounded(f"{handler.name} ({what})", _LONGEST_READING) if is_bounded else nullcontext():
                return read()
        except Misfit as error:
            raise Undecodable(redacted_error(inbox_options().redact_errors, str(error))) from error
        except BaseException as error:  # the user's code, see `run.run`
            reason = f"{what} of {handler.name} failed with {type(error).__name__}: {describe(error)}"
            if isinstance(error, HandlerTimeout):
                raise Unidentifiable(reason) from error
            if not is_outage(error):
                raise Undecodable(redacted_error(inbox_options().redact_errors, reason)) from error
            drop_unusable_connections()
            if on_new_session:
                raise (Unidentifiable if _databases_answer() else DatabaseUnavailable)(reason) from error
    raise AssertionError


def _databases_answer() -> bool:
    # In a transaction the connection cannot be replaced to find out.
    used = connections.all(initialized_only=True)
    return all(not connection.in_atomic_block and is_reachable(connection.alias) for connection in used)


def _of_this_queue(handler: Handler, topic: str, biz_id: str) -> str:
    if topic not in handler.topics:
        raise Undecodable(f"Its topic is {topic!r}, but this queue is for {', '.join(map(repr, handler.topics))}.")
    return _not_ours(biz_id)


def _not_ours(biz_id: str) -> str:
    return f"own:{biz_id}" if biz_id.startswith((PARKED, EDITED)) else biz_id


def outside_window(envelope: Envelope, options: InboxOptions) -> str:
    """Why this delivery is too old (or too new) for deduplication, or "": the maximum message age.

    Receipts are deleted after RETENTION; a later copy would have its effect again. The margin is far larger than any skew
    between the compared clocks: that of the producer's database, this machine's and, when receipts are deleted, our database's.
    """
    if (since := envelope.sent_at) is None:
        return ""
    age = utcnow() - since
    if age > options.oldest_run:
        return (
            f"It is {in_words(age)} old, past the deduplication window of {in_words(options.oldest_run)}, so it is unknown "
            f"whether it has been handled before. {_OVERRIDE}"
        )
    if -age > options.age_margin:
        return f"Its creation time is in the future ({since.isoformat()}), beyond the deduplication window. {_OVERRIDE}"
    return ""


def message_of(
    handler: Handler,
    envelope: Envelope,
    options: InboxOptions,
    *,
    needs_id: bool = True,
    attempt: int = 1,
    biz_id: str = "",
    is_bounded: bool = True,
) -> Message:
    """The message for a handler, of an envelope that was `opened`.

    Args:
        is_bounded: as for `identify`; it applies to the payload class of the handler.

    Raises:
        Undecodable: it has no identity, its body cannot be read, or its payload does not fit the handler's class.
        DatabaseUnavailable, Unidentifiable: as `identify`, by the payload class.
    """
    dedup_id = _identified_by_headers(envelope, needs_id=needs_id)
    compression = str(envelope.headers.get(COMPRESSION, ""))
    payload = decode_payload(envelope.body, envelope.content_type, compression=compression, limit=options.BODY_LIMIT_BYTES)
    message = Message(
        id=envelope.id,
        topic=envelope.topic,
        key=envelope.key,
        biz_id=biz_id or dedup_id,
        payload=payload,
        headers=dict(envelope.headers),
        created_at=envelope.created_at,
        attempt=attempt,
        redelivered=attempt > 1,
        correlation_id=envelope.correlation_id,
        causation_id=envelope.causation_id,
    )
    if not handler.payloads:
        return message
    return _by_the_user(handler, "payload", partial(handler.typed, message), is_bounded=is_bounded)


def message_for(arrival: Arrival, options: InboxOptions) -> Message:
    """The handler's argument for one run of a message that has been read before, or that only its headers identify.

    Raises:
        Undecodable: its body cannot be read.
    """
    attempt = 1 if arrival.stored is None else arrival.stored.attempts
    if arrival.handler.kind.dead_letters_of:
        return _dead_letter(arrival.handler, arrival.envelope, attempt, options)
    biz_id = business_id(arrival.row.biz_id)
    return message_of(arrival.handler, arrival.envelope, options, needs_id=False, attempt=attempt, biz_id=biz_id)


def _dead_letter(handler: Handler, stored: Envelope, attempt: int, options: InboxOptions) -> Message:
    """The message of a dead letter for its handler's `on_dead`, with how it died. A body that cannot be read is bytes."""
    headers: dict[str, Any] = dict(stored.headers)
    death = headers.pop(DEATH)
    envelope, biz_id = stored._replace(headers=headers), death["biz_id"]
    if is_parked(biz_id):
        envelope, biz_id = _as_it_came(stored, headers), ""
    read = partial(message_of, handler, options=options, needs_id=False, attempt=attempt, biz_id=biz_id)
    try:
        message = read(opened(envelope, options.BODY_LIMIT_BYTES))
    except Undecodable:
        empty = envelope._replace(body=b"null", content_type=JSON, headers={**headers, COMPRESSION: ""})
        message = replace(read(empty), payload=envelope.body, headers=dict(envelope.headers))
    return replace(message, error=FailedAttempt.from_row(death))


def _identified_by_headers(envelope: Envelope, *, needs_id: bool = True) -> str:
    """The message's own biz-id, else its id; "" if it has neither.

    Raises:
        Undecodable: it has no identity, or its content type is not accepted.
    """
    dedup_id = envelope.dedup_id
    if needs_id and not dedup_id:
        raise Undecodable("It has no identity: no readable CloudEvents id, bizid or AMQP message_id.")
    kind = media_type(envelope.content_type)
    if kind not in _JSON and not kind.endswith("+json"):
        raise Undecodable(f"Its content type {envelope.content_type!r} is not accepted: it is not JSON.")
    return dedup_id


def row_of(handler: Handler, envelope: Envelope, *, biz_id: str, redelivered: bool = False) -> NewRow:
    """The row of a delivery with this biz-id."""
    return NewRow(
        *carried_of(envelope),
        handler=handler.name,
        topic=envelope.topic if envelope.topic in handler.topics else handler.topics[0],
        biz_id=biz_id,
        message_id=envelope.id,
        body=envelope.body,
        digest=hashlib.sha256(envelope.body).hexdigest(),
        headers=headers_as_json(envelope.headers) if envelope.headers else "{}",
        replayed=envelope.replayed,
        redelivered=redelivered,
    )


def stored_arrival(handler: Handler, stored: InboxMessage) -> Arrival:
    """A stored message whose attempt was claimed."""
    return Arrival(handler=handler, row=stored_row(stored), envelope=stored_envelope(stored), stored=stored)


def stored_envelope(stored: InboxMessage) -> Envelope:
    """The envelope of a stored message. A parked delivery is as it came; it may be in structured mode."""
    envelope = Envelope(
        id=stored.message_id,
        topic=stored.topic,
        biz_id=business_id(stored.biz_id),
        body=bytes(stored.body),
        headers=dict(stored.headers),
        **dict(zip(CARRIED, carried_of(stored), strict=True)),
    )
    return _as_it_came(envelope, stored.headers) if stored.biz_id.startswith(PARKED) else envelope


def _as_it_came(stored: Envelope, headers: Mapping[str, Any]) -> Envelope:
    """The envelope of a parked delivery, of the columns of its row."""
    properties = {"message_id": stored.id, "content_type": stored.content_type, "timestamp": stored.created_at}
    return from_delivery(properties=properties, headers=headers, body=stored.body, routing_key=stored.topic)
