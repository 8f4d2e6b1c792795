"""OpenTelemetry spans from the publishing request through the relay to the handler."""

from datetime import timedelta

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import outbox
from exactly_once.telemetry import tracing
from inbox import RetryLater
from inbox.models import InboxMessage
from inbox.receiving.reading import read
from inbox.receiving.receive import receive
from outbox.models import OutboxMessage
from tests.support.deliveries import OPTIONS, an_envelope, deliver, drain, fails
from tests.support.relaying import drained, published, row_of

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def spans(monkeypatch):
    """The finished spans; a provider of this test alone, because the API lets a process set one only once."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing.otel, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(tracing, "_tracer", lambda: provider.get_tracer("tests"))
    return exporter.get_finished_spans


def of_kind(spans, kind):
    return [span for span in spans() if span.kind is kind]


def trace_id(traceparent):
    return int(traceparent.split("-")[1], 16)


def span_id(traceparent):
    return int(traceparent.split("-")[2], 16)


def test_trace_leads_from_the_request_through_the_relay_to_the_handler(spans, handles, settings):
    settings.OUTBOX = {"BROKER_URL": "local://"}
    handles(lambda message: outbox.publish("shop.stock.reserved", {}), name="reserve", topic="shop.order.placed")
    with tracing._tracer().start_as_current_span("POST /orders") as request:
        message = published("shop.order.placed", {})
    drained("local://")
    drain()

    [create, second] = of_kind(spans, trace.SpanKind.PRODUCER)
    [process] = of_kind(spans, trace.SpanKind.CONSUMER)
    send = of_kind(spans, trace.SpanKind.CLIENT)[0]
    assert create.name == "create shop.order.placed"
    assert create.parent.span_id == request.get_span_context().span_id
    assert span_id(row_of(message).traceparent) == create.context.span_id
    assert [link.context.span_id for link in send.links] == [create.context.span_id]
    assert process.name == "process shop.order.placed"
    assert process.parent.span_id == create.context.span_id
    assert second.parent.span_id == process.context.span_id
    assert {span.context.trace_id for span in (create, process, second)} == {request.get_span_context().trace_id}


def test_spans_have_the_attributes_of_the_semantic_conventions(spans, handles):
    handler = handles(lambda message: None, name="reserve")
    message = published("shop.order.placed", {})
    deliver(handler, an_envelope(id="m-1", correlation_id="c-1"))

    [create] = of_kind(spans, trace.SpanKind.PRODUCER)
    assert dict(create.attributes) == {
        "messaging.operation.name": "publish",
        "messaging.operation.type": "create",
        "messaging.destination.name": "shop.order.placed",
        "messaging.message.id": str(message.id),
        "messaging.message.conversation_id": str(message.id),
    }
    [process] = of_kind(spans, trace.SpanKind.CONSUMER)
    assert process.attributes["messaging.operation.type"] == "process"
    assert process.attributes["messaging.message.id"] == "m-1"
    assert process.attributes["exactly_once.handler"] == "reserve"


def test_failed_call_is_an_error_and_a_deferred_one_is_not(spans, handles):
    def defers(message):
        raise RetryLater(timedelta(hours=1))

    for function in (fails, defers):
        deliver(handles(function))

    failed, deferred = of_kind(spans, trace.SpanKind.CONSUMER)
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert failed.attributes["error.type"] == "ValueError"
    assert failed.events[0].name == "exception"
    assert deferred.status.status_code is trace.StatusCode.UNSET


def test_traceparent_that_the_caller_gives_is_kept(spans):
    given = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    message = published("t", {}, headers={"traceparent": given})

    assert row_of(message).traceparent == given
    assert spans() == ()


def test_batch_call_is_linked_to_its_messages(spans, handles):
    handler = handles(lambda messages: None, size=10)
    traceparents = [f"00-{'a' * 32}-{'1' * 16}-01", f"00-{'b' * 32}-{'2' * 16}-01"]
    arrivals = [read(handler, an_envelope(traceparent=one), OPTIONS) for one in traceparents]
    receive(handler, arrivals, OPTIONS)

    [process] = of_kind(spans, trace.SpanKind.CONSUMER)
    assert [link.context.span_id for link in process.links] == [0x1111111111111111, 0x2222222222222222]
    assert process.attributes["messaging.batch.message_count"] == 2


def test_without_opentelemetry_messages_are_published_and_handled(monkeypatch, handles, settings):
    monkeypatch.setattr(tracing, "otel", None)
    settings.OUTBOX = {"BROKER_URL": "local://"}
    handles(lambda message: outbox.publish("next", {}), topic="first")
    published("first", {}, headers={"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"})
    drained("local://")
    drain()

    assert InboxMessage.objects.filter(state="done").exists()
    assert trace_id(OutboxMessage.objects.get(topic="next").traceparent) == 0x4BF92F3577B34DA6A3CE929D0E0E4736


def test_without_an_sdk_the_context_of_the_caller_travels_and_no_span_is_made(monkeypatch):
    context = trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(context)):
        message = published("t", {})

    assert span_id(row_of(message).traceparent) == 0xDEF
