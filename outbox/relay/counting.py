"""Count what a pass has settled, after its commit: for `outbox.metrics`, and for the statistics (`telemetry.statistics`)."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from exactly_once.process.clock import utcnow
from exactly_once.telemetry.statistics import Tally
from exactly_once.transport import OutgoingMessage
from outbox import metrics
from outbox.store.claiming import DamagedRow, RelayedMessage
from outbox.store.settling import Settlement

_Outcomes = Mapping[str, Mapping[str, Sequence[int]]]
"""The positions of the settled messages, by outcome, which is a column of the statistics, and by topic."""

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
    outcomes = _by_topic(rows, settlement)
    _count_for_statistics(tally, outcomes, sent)
    # Nothing is computed while no exporter is attached.
    if metrics.PUBLISHED.is_attached and rows:
        _count_for_metrics(outcomes, rows, seconds)


def _by_topic(rows: Sequence[RelayedMessage], settlement: Settlement) -> _Outcomes:
    topics = {row.position: row.topic for row in rows}
    found: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for outcome, positions in _outcomes(settlement):
        by_topic = found[outcome]
        for position in positions:
            by_topic[topics[position]].append(position)
    return found


def _outcomes(settlement: Settlement) -> Iterator[tuple[str, Sequence[int]]]:
    yield "published", settlement.published
    yield "expired", settlement.expired
    for failure in settlement.failed:
        yield "dead" if failure.retry_after is None else "retried", failure.positions


def _count_for_statistics(tally: Tally, outcomes: _Outcomes, sent: Mapping[int, OutgoingMessage]) -> None:
    now = tally.now()
    for outcome, by_topic in outcomes.items():
        for topic, positions in by_topic.items():
            tally.count(topic, outcome, len(positions))
            if outcome == "published" and now:
                envelopes = [sent[position].envelope for position in positions]
                due = [envelope.deliver_at or envelope.created_at or now for envelope in envelopes]
                tally.time(topic, "to_broker", [(now - at).total_seconds() for at in due])


def _count_for_metrics(outcomes: _Outcomes, rows: Sequence[RelayedMessage], seconds: float) -> None:
    metrics.PASS_MESSAGES.observe(len(rows))
    metrics.PASS_SECONDS.observe(seconds)
    for outcome, by_topic in outcomes.items():
        for topic, positions in by_topic.items():
            for counter in _COUNTERS[outcome]:
                counter.add(len(positions), topic)
    published = {position for positions in outcomes.get("published", {}).values() for position in positions}
    now = utcnow()
    for row in rows:
        if row.position in published:
            with suppress(DamagedRow):  # an instant that was changed by hand
                due_at = max(row.created_at, row.deliver_at or row.created_at)
                metrics.LAG.observe(max((now - due_at).total_seconds(), 0.0))
