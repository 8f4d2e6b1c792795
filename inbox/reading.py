"""Reading a delivery: which message is it, for which handler, and may it be handled at all?

Nothing here touches a database. What cannot be read, cannot be named, or lies outside the deduplication window becomes an
arrival that is *refused*, with the reason for people; it will be stored as a dead letter and not lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta

from inbox.conf import InboxOptions
from inbox.handlers import Handler, Message
from inbox.models import InboxMessage
from inbox.store import NewRow
from outbox.kernel.clock import utcnow
from outbox.kernel.envelope import Envelope, Undecodable, decode_payload, headers_as_json, media_type
from outbox.kernel.text import describe

UNIDENTIFIED = "unidentified:"
"""Prefix of the biz-id of a delivery whose own could not be found; never given to a handler's own identities."""

_OVERRIDE = "Once you know that it has not been handled, run it by an override of the age fence; a plain retry does not."


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A delivery, read: the row it would be, and the message it carries.

    Attributes:
        message: what its handler gets; None when it is refused.
        refused: why it cannot be handled; then it is a dead letter from the start. "" when it can.
        quarantined: it is refused by the age fence, and could be handled but for that.
    """

    row: NewRow
    envelope: Envelope
    message: Message | None = None
    refused: str = ""
    quarantined: bool = False


def read(handler: Handler, envelope: Envelope, options: InboxOptions, *, refused: str = "") -> Arrival:
    """Decide what this delivery is for `handler`, or say why it is `refused`. Nothing is written, nothing is raised."""
    digest = hashlib.sha256(envelope.body).hexdigest()
    biz_id = outside = ""
    message: Message | None = None
    if not refused:
        try:
            message = message_of(envelope, options)
            biz_id = _identify(handler, message)
            refused = outside = outside_window(envelope, options)
        except Undecodable as error:
            refused = str(error)
    if not biz_id:
        biz_id = UNIDENTIFIED + hashlib.sha256(f"{envelope.dedup_id}\n{digest}".encode()).hexdigest()
    if message is not None and message.biz_id != biz_id:
        message = replace(message, biz_id=biz_id)
    row = _row(handler, envelope, biz_id=biz_id, digest=digest)
    return Arrival(row=row, envelope=envelope, message=message, refused=refused, quarantined=bool(outside))


def _identify(handler: Handler, message: Message) -> str:
    if message.topic != handler.topic:
        raise Undecodable(f"It says its topic is {message.topic!r}, but this queue is for {handler.topic!r}.")
    try:
        biz_id = handler.identify(message)
    except BaseException as error:  # the user's code, see _receive_fresh
        raise Undecodable(f"biz_id of {handler.name} failed with {type(error).__name__}: {describe(error)}") from error
    return biz_id if not biz_id.startswith(UNIDENTIFIED) else "own:" + biz_id


def identify_late(handler: Handler, message: Message, stored: InboxMessage) -> str:
    """The biz-id it was stored under; when it had none, and an operator retries it, what can be found now."""
    if not stored.biz_id.startswith(UNIDENTIFIED):
        return stored.biz_id
    return _identify(handler, message) if handler.biz_id else stored.biz_id


def outside_window(envelope: Envelope, options: InboxOptions) -> str:
    """Why this delivery is too old (or too new) to be told from a duplicate, or "". The age fence.

    Rows are purged after RETENTION; a copy that comes later would have its effect again. The margin is far larger than any
    skew of the clocks that are compared: the producer's database's, this machine's and, when rows are purged, our database's.
    """
    if envelope.created_at is None:
        return ""
    since = max(envelope.created_at, envelope.deliver_at or envelope.created_at)
    age = utcnow() - since
    if age > options.oldest_run:
        return (
            f"It is {_long(age)} old, past the deduplication window of {_long(options.oldest_run)}: whether it has been "
            f"handled before can no longer be known. {_OVERRIDE}"
        )
    if -age > options.AGE_FENCE_MARGIN:
        return (
            f"It claims to come from the future ({since.isoformat()}), which would escape the deduplication window. {_OVERRIDE}"
        )
    return ""


def _long(span: timedelta) -> str:
    return f"{span.days} days" if span >= timedelta(days=2) else f"{span.total_seconds() / 3600:.1f} hours"


def message_of(
    envelope: Envelope, options: InboxOptions, *, needs_id: bool = True, attempt: int = 1, biz_id: str = ""
) -> Message:
    """The message a handler gets.

    Raises:
        Undecodable: it has no identity, or its body cannot be read.
    """
    if needs_id and not envelope.dedup_id:
        raise Undecodable("It has no identity: neither a CloudEvents id, nor a bizid, nor an AMQP message_id that can be read.")
    kind = media_type(envelope.content_type)
    if kind not in options.ACCEPT and not kind.endswith("+json"):
        raise Undecodable(
            f"Its content type {envelope.content_type!r} is not accepted; INBOX['ACCEPT'] is {list(options.ACCEPT)}."
        )
    return Message(
        id=envelope.id,
        topic=envelope.topic,
        key=envelope.key,
        biz_id=biz_id or envelope.dedup_id,
        payload=decode_payload(envelope.body, envelope.content_type),
        headers=dict(envelope.headers),
        created_at=envelope.created_at,
        attempt=attempt,
        redelivered=attempt > 1,
        correlation_id=envelope.correlation_id,
        causation_id=envelope.causation_id,
    )


def messages_of(arrival: Arrival, options: InboxOptions) -> Iterator[Message]:
    """The message for the first run, and for every further one a new one: a handler may change its payload."""
    if arrival.message is not None:
        yield arrival.message
    while True:
        yield message_of(arrival.envelope, options, biz_id=arrival.row.biz_id)


def _row(handler: Handler, envelope: Envelope, *, biz_id: str, digest: str) -> NewRow:
    return NewRow(
        handler=handler.name,
        topic=handler.topic,
        biz_id=biz_id,
        message_id=envelope.id,
        key=envelope.key,
        content_type=envelope.content_type,
        body=envelope.body,
        digest=digest,
        headers=headers_as_json(envelope.headers),
        source=envelope.source,
        correlation_id=envelope.correlation_id,
        causation_id=envelope.causation_id,
        traceparent=envelope.traceparent,
        created_at=envelope.created_at,
        replayed=envelope.replayed,
    )


def stored_envelope(stored: InboxMessage) -> Envelope:
    return Envelope(
        id=stored.message_id,
        topic=stored.topic,
        source=stored.source,
        created_at=stored.created_at,
        biz_id=stored.biz_id,
        key=stored.key,
        correlation_id=stored.correlation_id,
        causation_id=stored.causation_id,
        traceparent=stored.traceparent,
        content_type=stored.content_type,
        body=bytes(stored.body),
        headers=stored.headers,
    )
