"""Each call of a handler as a span and in the metrics of this process; see `telemetry.tracing` and `inbox.metrics`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from exactly_once.process import work
from exactly_once.process.clock import monotonic, utcnow
from exactly_once.telemetry import tracing
from exactly_once.wire.envelope import Envelope
from inbox import metrics
from inbox.conf import inbox_options
from inbox.errors import RetryLater
from inbox.handlers.handler import Handler


@contextmanager
def observed(handler: Handler, *envelopes: Envelope) -> Iterator[None]:
    """Observe one call of the handler for these messages."""
    began_at = monotonic()
    before = work.begin("inbox", handler.using, handler.name, envelopes[0].id, len(envelopes))
    try:
        with _span(handler, envelopes) if tracing.is_recording() else nullcontext():
            yield
        if metrics.LAG.is_attached:
            _count_lag(handler, envelopes)
    finally:
        work.end(before)
        metrics.HANDLER_SECONDS.observe(monotonic() - began_at, handler.name)
        if handler.batch:
            metrics.BATCH_MESSAGES.observe(len(envelopes), handler.name)


def _span(handler: Handler, envelopes: tuple[Envelope, ...]) -> AbstractContextManager[None]:
    options = inbox_options()
    return tracing.processing(
        tracing.system_of(options.broker_url),
        envelopes,
        expected=(RetryLater,),
        messaging__consumer__group__name=options.GROUP,
        exactly_once__handler=handler.name,
    )


def _count_lag(handler: Handler, envelopes: tuple[Envelope, ...]) -> None:
    now = utcnow()
    for envelope in envelopes:
        if envelope.created_at is not None:
            due_at = max(envelope.created_at, envelope.deliver_at or envelope.created_at)
            metrics.LAG.observe(max((now - due_at).total_seconds(), 0.0), handler.name)
