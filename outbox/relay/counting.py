"""Count what a pass has settled, for the statistics; see `kernel.statistics`. Called after the commit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from outbox.kernel.statistics import Tally
from outbox.kernel.transport import OutgoingMessage
from outbox.store.claiming import RelayedMessage
from outbox.store.settling import Settlement


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
