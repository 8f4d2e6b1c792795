"""Store a Celery message as a row of the outbox.

Celery passes its messages to a kombu producer. `RowProducer` replaces that producer for one call and stores the serialised
body, the headers, the properties, the exchange and the routing key. It connects to no broker.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

import kombu
from celery.utils.time import maybe_iso8601, maybe_make_aware

from exactly_once.process.clock import utcnow
from exactly_once.telemetry.tracing import current_cause
from exactly_once.transport.broker import speaks_amqp
from exactly_once.wire.envelope import Envelope
from exactly_once.wire.formats import CELERY_TOPICS, Wire
from exactly_once.wire.identity import new_message_id, uuid_in
from exactly_once.wire.text import describe, fit
from outbox import doorbell
from outbox.api import TRACEPARENT
from outbox.conf import outbox_options
from outbox.errors import InvalidMessage, PayloadTooLarge
from outbox.models import MAX_PRIORITY
from outbox.store import writing
from outbox.transports.frames import FrameWriter

_PROTOCOL = 2
_USUAL_FRAME_BYTES = 128 * 1024
"""RabbitMQ's default frame_max; the headers of a message must fit into one frame."""
_LONGEST_EXPIRATION = 2**32 - 1
"""In milliseconds, some 50 days."""
_AT_ONCE = timedelta(microseconds=1)


class RowProducer(kombu.Producer):  # type: ignore[misc] # kombu exports none of its names
    """Writes task messages to the outbox of `alias`, in the transaction that is open there.

    Raises:
        InvalidMessage: the app does not use version 2 of Celery's message protocol.
    """

    def __init__(self, app: Any, alias: str) -> None:
        if app.conf.task_protocol != _PROTOCOL:
            raise InvalidMessage(
                f"task_protocol is {app.conf.task_protocol!r} and the outbox supports Celery's protocol {_PROTOCOL} only: "
                f"set it to {_PROTOCOL}, or give the task another base than OutboxTask."
            )
        super().__init__(None, auto_declare=False)
        # Never connected: Celery reads the list of its exceptions.
        self.__connection__ = app.amqp.producer_pool.connections.connection
        self._app = app
        self._alias = alias
        self._borrowed: Any = None

    @property
    def channel(self) -> Any:
        """Only the result backend rpc:// uses it: it declares its queue of replies before the call."""
        if self._borrowed is None:
            self._borrowed = self._app.pool.acquire(block=True)
        return self._borrowed.default_channel

    def release(self) -> None:
        borrowed, self._borrowed = self._borrowed, None
        if borrowed is not None:
            borrowed.release()

    def publish(self, body: Any, *, headers: dict[str, Any], exchange: Any, declare: Any = None, **options: Any) -> None:
        if "task" not in headers:
            # The event task-sent. The task is not sent yet; the signal message_published reports that.
            return
        # This producer declares nothing; the declarations give the type of the exchange.
        declare = [*(declare or ()), *([exchange] if isinstance(exchange, kombu.Exchange) else ())]
        super().publish(body, headers=headers, exchange=exchange, declare=declare, **{**options, "retry": False})

    def _publish(
        self,
        body: str | bytes,
        priority: int | None,
        content_type: str,
        content_encoding: str,
        headers: dict[str, Any],
        properties: dict[str, Any],
        routing_key: str,
        mandatory: object,
        immediate: object,
        exchange: str,
        declare: Iterable[Any],
        *_: object,
    ) -> None:
        """Store the row. kombu calls this with the prepared message, to write it to a channel."""
        due, end = (self._instant(headers.get(name)) for name in ("eta", "expires"))
        deliver_at = due if due is not None and due > utcnow() else None
        if deliver_at is not None and end is not None and "expiration" in properties:
            # Celery counts it from the call, the broker from the arrival of the message.
            properties["expiration"] = str(max(int((end - deliver_at).total_seconds() * 1000), 0))
        if int(properties.get("expiration", 0)) > _LONGEST_EXPIRATION:
            # RabbitMQ would refuse the message. The worker checks the header in any case.
            del properties["expiration"]
        wire = Wire(
            exchange=exchange,
            exchange_type=self._type_of(exchange, declare),
            routing_key=routing_key,
            content_type=content_type,
            content_encoding=content_encoding,
            priority=priority,
            headers=headers,
            properties=properties,
        )
        row = _row(body.encode() if isinstance(body, str) else bytes(body), wire, deliver_at, end)
        row = row._replace(wire=_text(wire, row))
        # Celery accepts the same task id twice, so this does, too: the later row gets a new message id.
        while writing.insert(self._alias, row) is None:
            row = row._replace(message_id=new_message_id())
        doorbell.ring_if_soon(self._alias, deliver_at)

    def _type_of(self, exchange: str, declare: Iterable[Any]) -> str:
        for entity in (*declare, *self._app.amqp.queues.values()):
            declared = entity if isinstance(entity, kombu.Exchange) else entity.exchange
            if declared is not None and declared.name == exchange:
                return str(declared.type)
        return "direct"

    def _instant(self, value: Any) -> datetime | None:
        """An instant in a header as the worker reads it: a naive one is UTC, whatever the time zone of the app."""
        if not value:
            return None
        instant: datetime = maybe_make_aware(maybe_iso8601(value), self._app.timezone)
        return instant


def _row(body: bytes, wire: Wire, deliver_at: datetime | None, end: datetime | None) -> writing.NewRow:
    headers, cause = wire.headers, current_cause()
    task_id = str(headers["id"])
    limit = outbox_options().BODY_LIMIT_BYTES
    if len(body) > limit:
        raise PayloadTooLarge(
            f"The arguments of the task {headers['task']} have {len(body)} bytes as {wire.content_type} and "
            f"OUTBOX['BODY_LIMIT_BYTES'] is {limit}. Store the large part elsewhere and pass a reference to it, or raise the "
            "limit."
        )
    return writing.NewRow(
        message_id=uuid_in(task_id) or new_message_id(),
        topic=fit(f"{CELERY_TOPICS}{headers['task']}"),
        biz_id=fit(task_id),
        key="",
        priority=_priority(wire.priority),
        body=body,
        headers="{}",
        correlation_id=cause.correlation_id or fit(str(headers.get("root_id") or task_id)),
        causation_id=cause.message_id or fit(str(headers.get("parent_id") or "")),
        traceparent=fit(str(headers.get(TRACEPARENT) or cause.traceparent)),
        is_unique=False,
        delay=None,
        deliver_at=deliver_at,
        expires_in=None if end is None else max(end - (deliver_at or utcnow()), _AT_ONCE),
    )


def _priority(priority: int | None) -> int:
    """The row's priority, by which the relay sends. With kombu's other transports the number may have the opposite meaning."""
    if not priority or not speaks_amqp(outbox_options().BROKER_URL):
        return 0
    return min(max(int(priority), 0), MAX_PRIORITY)


def _text(wire: Wire, row: writing.NewRow) -> str:
    """`wire` as text, after a check that it can be sent.

    Raises:
        InvalidMessage: it cannot be sent.
    """
    try:
        text = wire.to_text()
        if speaks_amqp(outbox_options().BROKER_URL):
            writer = FrameWriter(channel=1, frame_max=_USUAL_FRAME_BYTES)
            writer.publish_formed(Envelope(id=str(row.message_id), topic=row.topic), Wire.from_text(text))
    except Exception as error:
        raise InvalidMessage(
            f"The task {wire.headers['task']} cannot be written to the outbox, because of its headers, properties or names: "
            f"{describe(error)}. Headers may contain text, numbers, booleans, None, dates, lists and dicts of these; pass "
            "anything else to the task as an argument."
        ) from error
    return text
