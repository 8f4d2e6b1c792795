"""Monitoring of the inbox: gauges read from its tables, and the dashboard and alert rules for Prometheus and Grafana."""

from collections.abc import Iterator

from exactly_once.telemetry.prometheus import Sample, TableGauges, processes_by_state, seconds_since
from inbox import metrics
from inbox.operators import accounting
from inbox.operators.processes import queued, unattended
from inbox.store.handler_rows import consumers


def table_gauges(alias: str) -> TableGauges:
    """A collector for the inbox of this database."""
    return TableGauges(alias, metrics.READABLE, _read)


def _read(alias: str) -> Iterator[Sample]:
    for state, count in accounting.open_states(alias).items():
        yield metrics.MESSAGES, (state,), count
    yield metrics.OLDEST_DUE, (), seconds_since(accounting.oldest_waiting(alias))
    yield from processes_by_state(metrics.CONSUMERS, consumers.rows(alias))
    yield metrics.UNATTENDED, (), len(unattended(alias))
    for handler, count in queued(alias).items():
        yield metrics.QUEUED, (handler,), count
