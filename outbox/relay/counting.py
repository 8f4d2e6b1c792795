"""The metrics of a pass; see `outbox.metrics`. Nothing is computed while no exporter is attached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

from outbox import metrics
from outbox.kernel.clock import utcnow
from outbox.kernel.meter import Instrument
from outbox.store.claiming import DamagedRow, RelayedMessage
from outbox.store.settling import Settlement


def count_pass(rows: Sequence[RelayedMessage], settlement: Settlement, seconds: float) -> None:
    """Count what a pass has settled, and how long it took."""
    if not (metrics.PUBLISHED.is_attached and rows):
        return
    metrics.PASS_MESSAGES.observe(len(rows))
    metrics.PASS_SECONDS.observe(seconds)
    by_position = {row.position: row for row in rows}
    _count(metrics.PUBLISHED, settlement.published, by_position)
    _count(metrics.EXPIRED, settlement.expired, by_position)
    for failure in settlement.failed:
        _count(metrics.FAILED_ATTEMPTS, failure.positions, by_position)
        if failure.retry_after is None:
            _count(metrics.DEAD, failure.positions, by_position)
    now = utcnow()
    for position in settlement.published:
        row = by_position[position]
        with suppress(DamagedRow):  # an instant that was changed by hand
            due_at = max(row.created_at, row.deliver_at or row.created_at)
            metrics.LAG.observe(max((now - due_at).total_seconds(), 0.0))


def _count(instrument: Instrument, positions: Sequence[int], by_position: Mapping[int, RelayedMessage]) -> None:
    for topic, count in Counter(by_position[position].topic for position in positions).items():
        instrument.add(count, topic)
