"""The message being handled in this context, which the messages that its handler publishes name as their cause; and spans.

The spans of OpenTelemetry, the extra `django-exactly-once[opentelemetry]`, lead from the publishing request to the handler:

- *create* (producer): `publish()`. Its context travels with the message as `traceparent`.
- *send* (client): the relay sends messages to the broker; linked to the create spans.
- *process* (consumer): a handler is called; a child of the create span. A call with several messages is linked to theirs.

Names and attributes are those of the semantic conventions for messaging. Without OpenTelemetry nothing is done, and the
`traceparent` of the caller's message is passed on.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

otel: Any = None
"""The module `opentelemetry.trace`, or None if it is not installed."""
try:
    from opentelemetry import trace as otel  # type: ignore[no-redef,unused-ignore]
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    pass
else:
    _propagator = TraceContextTextMapPropagator()

_TRACER = "django-exactly-once"
_TRACEPARENT = "traceparent"
_MOST_LINKS = 128
OUTER_CORRELATION = "outercorrelationid"
"""The header of a request: the correlation id of the chain in which it was made, which its answer continues."""


@dataclass(frozen=True)
class Cause:
    """The cause of a message that is published now.

    Attributes:
        message_id: the message being handled; becomes the causation id.
        correlation_id: the first message of the whole chain.
        traceparent: the W3C trace context of the message being handled, or "".
    """

    message_id: str = ""
    correlation_id: str = ""
    traceparent: str = ""


handled: ContextVar[Cause | None] = ContextVar("message being handled", default=None)
_NO_CAUSE = Cause()


def current_cause() -> Cause:
    return handled.get() or _NO_CAUSE


@contextmanager
def caused_by(cause: Cause) -> Iterator[None]:
    token = handled.set(cause)
    try:
        yield
    finally:
        handled.reset(token)


class Traced(Protocol):
    """A message on its way."""

    @property
    def id(self) -> str: ...
    @property
    def topic(self) -> str: ...
    @property
    def correlation_id(self) -> str: ...
    @property
    def traceparent(self) -> str: ...


def is_recording() -> bool:
    """Is OpenTelemetry installed and configured? With only its API, as a dependency of another package, no span is recorded."""
    return otel is not None and not isinstance(otel.get_tracer_provider(), otel.ProxyTracerProvider)


def creating() -> Callable[[str, str, str], str]:
    """How to get the traceparent of a message that is published now: that of its create span.

    The span is a child of the current span; else of the message whose handler publishes. Without OpenTelemetry, and if
    neither exists and no SDK is configured, it is the traceparent of the message being handled, or "".

    Returns:
        a function of topic, message id and correlation id.
    """
    traceparent = current_cause().traceparent
    if otel is None:
        return lambda *_: traceparent
    current = otel.get_current_span()
    is_inside = current.get_span_context().is_valid
    if not is_recording():
        inherited = _traceparent(current) if is_inside else traceparent
        return lambda *_: inherited
    return partial(_created, None if is_inside else _context(traceparent), traceparent)


def _created(parent: Any, inherited: str, topic: str, message_id: str, correlation_id: str) -> str:
    attributes = {
        "messaging.operation.name": "publish",
        "messaging.operation.type": "create",
        "messaging.destination.name": topic,
        "messaging.message.id": message_id,
        "messaging.message.conversation_id": correlation_id,
    }
    span = _tracer().start_span(f"create {topic}", parent, otel.SpanKind.PRODUCER, attributes)
    span.end()
    return _traceparent(span) or inherited


@contextmanager
def sending(system: str, messages: Sequence[Traced]) -> Iterator[Any]:
    """The span of sending these messages; yields it, or None."""
    if not is_recording():
        yield None
        return
    topics = {message.topic for message in messages}
    attributes: dict[str, Any] = {
        "messaging.system": system,
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.batch.message_count": len(messages),
    }
    if len(topics) == 1:
        attributes["messaging.destination.name"] = next(iter(topics))
    name = f"send {attributes.get('messaging.destination.name', '')}".rstrip()
    links = _links(messages)
    with _tracer().start_as_current_span(name, kind=otel.SpanKind.CLIENT, attributes=attributes, links=links) as span:
        yield span


def failed(span: Any, reason: str) -> None:
    """Mark the span as failed."""
    if span is not None:
        span.set_attribute("error.type", reason)
        span.set_status(otel.StatusCode.ERROR, reason)


@contextmanager
def processing(
    system: str, messages: Sequence[Traced], *, expected: tuple[type[BaseException], ...] = (), **particular: str | int
) -> Iterator[None]:
    """The span of one call of a handler, the current span during the block.

    Call it only if `is_recording`.

    Args:
        expected: exceptions that are not errors.
        particular: further attributes; `__` stands for the dot in a name.
    """
    first = messages[0]
    attributes: dict[str, Any] = {
        "messaging.system": system,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": first.topic,
        **{name.replace("__", "."): value for name, value in particular.items()},
    }
    context, links = None, []
    if len(messages) == 1:
        context = _context(first.traceparent)
        attributes["messaging.message.id"] = first.id
        attributes["messaging.message.conversation_id"] = first.correlation_id
    else:
        links = _links(messages)
        attributes["messaging.batch.message_count"] = len(messages)
    with _tracer().start_as_current_span(
        f"process {first.topic}",
        context,
        otel.SpanKind.CONSUMER,
        attributes,
        links,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield
        except BaseException as error:
            if not isinstance(error, expected):
                span.record_exception(error)
                failed(span, type(error).__name__)
            raise


def _tracer() -> Any:
    return otel.get_tracer(_TRACER)


def _context(traceparent: str) -> Any:
    """The trace context of a message; None if it has none."""
    return _propagator.extract({_TRACEPARENT: traceparent}) if traceparent else None


def _links(messages: Sequence[Traced]) -> list[Any]:
    traceparents = dict.fromkeys(message.traceparent for message in messages if message.traceparent)
    contexts = (otel.get_current_span(_context(one)).get_span_context() for one in list(traceparents)[:_MOST_LINKS])
    return [otel.Link(context) for context in contexts if context.is_valid]


def _traceparent(span: Any) -> str:
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, otel.set_span_in_context(span))
    return carrier.get(_TRACEPARENT, "")
