"""The message that a transport sends for a row."""

from exactly_once.transport.interface import OutgoingMessage
from exactly_once.wire.envelope import REPLAY_HEADER, Envelope
from outbox.conf import OutboxOptions
from outbox.store.claiming import RelayedMessage


def outgoing(row: RelayedMessage, options: OutboxOptions, *, replayed: bool = False, queue: str = "") -> OutgoingMessage:
    """The message of `row`.

    Args:
        replayed: an operator has it sent again. A restored message says so in its headers.
        queue: see `OutgoingMessage`.

    Raises:
        DamagedRow: it cannot be sent.
    """
    row.require_undamaged()
    headers = dict(row.headers)
    restored = headers.pop(REPLAY_HEADER, None) is not None
    return OutgoingMessage(
        position=row.position,
        priority=row.priority,
        wire=row.wire,
        expires_in_seconds=row.expires_in_seconds,
        queue=queue,
        exchange=options.topic(row.topic).EXCHANGE if options.TOPICS else "",
        envelope=Envelope(
            id=row.id,
            topic=row.topic,
            source=options.source,
            created_at=row.created_at,
            deliver_at=row.deliver_at,
            biz_id=row.biz_id,
            key=row.key,
            correlation_id=row.correlation_id,
            causation_id=row.causation_id,
            traceparent=row.traceparent,
            body=row.body,
            headers=headers,
            replayed=replayed or restored,
        ),
    )
