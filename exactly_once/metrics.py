"""Figures of this process: counters, gauges and histograms that cost nothing until an exporter is attached.

An instrument is declared once, in the module `metrics` of its app; code calls `add` or `observe` on it. Until `attach`
gives it a prometheus_client metric, such a call is one comparison. The values of a label are bounded: after `MOST_SERIES` label
sets of an instrument, further ones are counted under `OTHER`, because a topic or an ordering key from outside could otherwise
fill the memory of this process and of the monitoring system.

This module does not import prometheus_client, which is an extra.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_SERIES = 500
"""Label sets of one instrument in one process."""
OTHER = "(other)"

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
SIZES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


instruments: dict[str, "Instrument"] = {}
"""Every declared instrument, by name."""


@dataclass(eq=False, kw_only=True)
class Instrument:
    """One metric.

    Attributes:
        name: as Prometheus shows it; that of a counter ends in `_total`.
        kind: "counter", "gauge" or "histogram".
        help: one line.
        labels: names of its labels.
        buckets: upper bounds of a histogram.
        is_attached: the figure is exported; else its computation can be saved.
    """

    name: str
    kind: str
    help: str
    labels: Sequence[str] = ()
    buckets: Sequence[float] = ()
    is_attached: bool = False
    _metric: Any = None
    _series: dict[tuple[str, ...], Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        instruments[self.name] = self

    def attach(self, metric: Any) -> None:
        """Let this prometheus_client metric count."""
        self._series.clear()
        self._metric, self.is_attached = metric, metric is not None

    def add(self, amount: float, *values: str) -> None:
        """Add to a counter, or to a gauge."""
        if self._metric is not None:
            self._of(values).inc(amount)

    def observe(self, value: float, *values: str) -> None:
        """Count a value in a histogram."""
        if self._metric is not None:
            self._of(values).observe(value)

    def _of(self, values: tuple[str, ...]) -> Any:
        if not self.labels:
            return self._metric
        series = self._series.get(values)
        if series is None:
            bounded = values if len(self._series) < MOST_SERIES else (OTHER,) * len(values)
            series = self._metric.labels(*bounded)
            if bounded == values:
                self._series[values] = series
        return series


def counter(name: str, help: str, *labels: str) -> Instrument:  # noqa: A002 - the word of prometheus_client
    return Instrument(name=name, kind="counter", help=help, labels=labels)


def gauge(name: str, help: str, *labels: str) -> Instrument:  # noqa: A002 - as above
    return Instrument(name=name, kind="gauge", help=help, labels=labels)


def histogram(name: str, help: str, *labels: str, buckets: Sequence[float] = SECONDS) -> Instrument:  # noqa: A002 - as above
    return Instrument(name=name, kind="histogram", help=help, labels=labels, buckets=buckets)


OUTAGES = counter("exactly_once_outages_total", "Outages that began, by what was unavailable.", "dependency")
OUTAGE_SECONDS = counter(
    "exactly_once_outage_seconds_total", "Seconds in which a dependency was unavailable to this process.", "dependency"
)
