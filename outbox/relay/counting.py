"""Count what a pass has settled, after its commit: for `outbox.metrics`, and for the statistics (`kernel.statistics`)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress

from outbox import metrics
from outbox.kernel.clock import utcnow
from outbox.kernel.meter import Instrument
from outbox.kernel.statistics import Tally
from outbox.kernel.transport import OutgoingMessage
from outbox.store.claiming import DamagedRow, RelayedMessage
from outbox.store.settling import Settlement


def count_pass(rows: Sequence[RelayedMessage], settlement: Settlement, seconds: float) -> None:
    """Count for the metrics what a pass has settled, and its duration. Nothing is computed while no exporter is attached."""
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


def count_settled(
    tally: Tally, rows: Sequence[RelayedMessage], settlement: Settlement, sent: Mapping[int, OutgoingMessage]
) -> None:
    """Count the settled messages by topic, and how long after their due time the published ones were settled."""
    now = tally.now()
    topics = {row.position: row.topic for row in rows}
    published: defaultdict[str, list[float]] = defaultdict(list)
    for position in settlement.published:
        envelope = sent[position].envelope
        due = envelope.deliver_at or envelope.created_at
        published[topics[position]].append((now - due).total_seconds() if now and due else 0.0)
    for topic, seconds in published.items():
        tally.count(topic, "published", len(seconds))
        if now:
            tally.time(topic, "to_broker", seconds)
    for position in settlement.expired:
        tally.count(topics[position], "expired")
    for failure in settlement.failed:
        for position in failure.positions:
            tally.count(topics[position], "dead" if failure.retry_after is None else "retried")
