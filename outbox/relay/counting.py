"""Count what a pass has settled, after its commit: for `outbox.metrics`, and for the statistics (`telemetry.statistics`)."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from exactly_once.process.clock import utcnow
from exactly_once.telemetry.statistics import Tally
from exactly_once.transport.interface import OutgoingMessage
from outbox import metrics
from outbox.store.messages import RelayedMessage
from outbox.store.settling import Settlement

_COUNTERS = {
    "published": [metrics.PUBLISHED],
    "retried": [metrics.FAILED_ATTEMPTS],
    "dead": [metrics.FAILED_ATTEMPTS, metrics.DEAD],
    "expired": [metrics.EXPIRED],
}


def count_pass(
    tally: Tally,
    rows: Sequence[RelayedMessage],
    settlement: Settlement,
    sent: Mapping[int, OutgoingMessage],
    seconds: float,
) -> None:
    """Count the settled messages by topic, and how long after their due time the published ones were settled.

    Args:
        seconds: the duration of the pass.
    """
    if rows:
        metrics.PASS_MESSAGES.observe(len(rows))
        metrics.PASS_SECONDS.observe(seconds)
    topics = {row.position: row.topic for row in rows}
    for outcome, positions in _outcomes(settlement):
        for topic, count in Counter(topics[position] for position in positions).items():
            tally.count(topic, outcome, count)
            for counter in _COUNTERS[outcome]:
                counter.add(count, topic)
    now = tally.now() or utcnow()
    lateness: defaultdict[str, list[float]] = defaultdict(list)
    for position in settlement.published:
        envelope = sent[position].envelope
        due_at = envelope.deliver_at or envelope.created_at or now
        lateness[topics[position]].append((now - due_at).total_seconds())
    for topic, each_late in lateness.items():
        tally.time(topic, "to_broker", each_late)
        for late in each_late if metrics.LAG.is_attached else ():
            metrics.LAG.observe(max(late, 0.0))


def _outcomes(settlement: Settlement) -> Iterator[tuple[str, Sequence[int]]]:
    """The positions by outcome, which is a column of the statistics."""
    yield "published", settlement.published
    yield "expired", settlement.expired
    for failure in settlement.failed:
        yield "dead" if failure.retry_after is None else "retried", failure.positions
