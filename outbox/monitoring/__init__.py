"""Monitoring of the outbox: gauges read from its tables, and the dashboard and alert rules for Prometheus and Grafana."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from exactly_once.telemetry.prometheus import Sample, TableGauges, processes_by_state, seconds_since
from outbox import metrics
from outbox.operators.figures import count_live
from outbox.relay.heartbeat import relays
from outbox.states import SETTLED, TopicState
from outbox.store import paused_topics
from outbox.store.pending_callbacks import pending_calls

_MOST_TOPICS = 100


def table_gauges(alias: str) -> TableGauges:
    """A collector for the outbox of this database."""
    return TableGauges(alias, metrics.READABLE, _read)


def _read(alias: str) -> Iterator[Sample]:
    counted = count_live(alias)
    for state, count in counted.states.items():
        if state not in SETTLED:
            yield metrics.MESSAGES, (state,), count
    yield metrics.OLDEST_DUE, (), seconds_since(counted.oldest_waiting)
    yield metrics.PENDING_CALLBACKS, (), pending_calls(alias).pending
    paused: list[Any] = list(paused_topics.paused_topics(alias).exclude(mode=TopicState.LIMITED)[:_MOST_TOPICS])
    for topic in paused:
        yield metrics.PAUSED_MESSAGES, (topic.topic,), topic.messages
    yield from processes_by_state(metrics.RELAYS, relays.rows(alias))
