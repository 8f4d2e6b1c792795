"""Export the figures of `metrics` with prometheus_client, the extra `django-exactly-once[prometheus]`.

The counters and histograms are those of this process. The table gauges are read from the database when Prometheus scrapes:
not more often than every `_FRESH_SECONDS`, and so seldom that reading them takes at most a twentieth of the time. A scrape does
not wait for a database that hangs, or the threads of abandoned scrapes would pile up. With PROMETHEUS_MULTIPROC_DIR set, as for
the processes of a Celery worker, the figures of all its processes are served together.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext as _

from exactly_once.metrics import Instrument, instruments
from exactly_once.process.clock import monotonic, utcnow
from exactly_once.process.logs import escaping_logger
from exactly_once.sql.probing import Reading
from exactly_once.wire.text import describe

if TYPE_CHECKING:
    from datetime import datetime

logger = escaping_logger(__name__)

Sample = tuple[Instrument, Sequence[str], float]
"""A gauge, the values of its labels, and its value."""

_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
_EVERY_ADDRESS = "0.0.0.0"  # noqa: S104 - Prometheus is usually on another host
_FRESH_SECONDS = 5.0
_LONGEST_SECONDS = 8.0
"""How long a scrape waits for the tables. Prometheus waits for ten seconds by default."""
_SHARE = 20
"""Reading the tables takes at most one part in this many of the time (1/20)."""
_attaching = threading.Lock()


def add_arguments(parser: CommandParser) -> None:
    """The options of a process that can be scraped."""
    parser.add_argument(
        "--metrics-port", type=int, metavar="PORT", help=_("serve Prometheus metrics on this port (default: do not)")
    )
    parser.add_argument(
        "--metrics-address",
        default=_EVERY_ADDRESS,
        metavar="ADDRESS",
        help=_("address to serve them on (default: %(default)s)"),
    )


def serve_metrics(options: dict[str, Any], *tables: TableGauges) -> None:
    """Serve the metrics of this process and these tables, if the command was asked to.

    Raises:
        CommandError: prometheus_client is not installed, or the port cannot be used.
    """
    port, address = options["metrics_port"], options["metrics_address"]
    if port is None:
        return
    try:
        import prometheus_client  # noqa: PLC0415 - an extra
        from prometheus_client import multiprocess  # noqa: PLC0415
    except ImportError as error:
        raise CommandError(
            '--metrics-port needs prometheus_client: run `pip install "django-exactly-once[prometheus]"`.'
        ) from error
    registry: Any = prometheus_client.REGISTRY
    if os.environ.get(_MULTIPROCESS):
        registry = prometheus_client.CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
    attach()
    for gauges in tables:
        registry.register(gauges)
    try:
        prometheus_client.start_http_server(port, address, registry)
    except OSError as error:
        raise CommandError(f"--metrics-port {port}: {describe(error)}.") from error
    logger.info("Metrics are served on http://%s:%d/metrics.", address, port)


def attach() -> None:
    """Let prometheus_client count in its default registry, from now on. A second call changes nothing.

    Raises:
        ImportError: prometheus_client is not installed.
    """
    import prometheus_client  # noqa: PLC0415 - an extra

    with _attaching:
        for instrument in instruments.values():
            if instrument.is_attached or instrument.kind == "gauge":
                continue
            if instrument.kind == "counter":
                metric: Any = prometheus_client.Counter(instrument.name, instrument.help, instrument.labels)
            else:
                metric = prometheus_client.Histogram(
                    instrument.name, instrument.help, instrument.labels, buckets=(*instrument.buckets, inf)
                )
            instrument.attach(metric)


class TableGauges:
    """A collector of prometheus_client for the gauges that are read from the tables of one database.

    Args:
        readable: the gauge that says whether they could be read.
        read: reads all other gauges.
    """

    def __init__(self, alias: str, readable: Instrument, read: Callable[[str], Iterable[Sample]]) -> None:
        self._alias = alias
        self._readable = readable
        self._read = read
        self._reading = Reading[list[Sample]]("metrics", alias)
        self._samples: list[Sample] = []
        self._read_again_at = -inf

    def describe(self) -> Iterable[Any]:
        """Nothing, so that registering this collector reads no table."""
        return []

    def collect(self) -> Iterator[Any]:
        """The gauges as metric families. Scrapes that come together share one reading."""
        from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415 - an extra

        samples = self._samples if monotonic() < self._read_again_at else self._read_now()
        families: dict[str, Any] = {}
        for gauge, values, value in samples:
            if gauge.name not in families:
                families[gauge.name] = GaugeMetricFamily(gauge.name, gauge.help, labels=gauge.labels)
            families[gauge.name].add_metric([self._alias, *values], value)
        yield from families.values()

    def _read_now(self) -> list[Sample]:
        try:
            return self._reading.result(self._fresh, _LONGEST_SECONDS)
        except TimeoutError:
            logger.info("The metrics of the tables on %r are not read: no answer within %g s.", self._alias, _LONGEST_SECONDS)
            return [(self._readable, (), 0.0)]

    def _fresh(self) -> list[Sample]:
        began_at, pause = monotonic(), _FRESH_SECONDS
        try:
            found = [*self._read(self._alias), (self._readable, (), 1.0)]
            pause = max(pause, _SHARE * min(monotonic() - began_at, _LONGEST_SECONDS))
        except Exception as error:  # noqa: BLE001 - a scrape must not fail with the database
            logger.info("The metrics of the tables on %r cannot be read: %s", self._alias, describe(error))
            found = [(self._readable, (), 0.0)]
        self._samples, self._read_again_at = found, monotonic() + pause
        return found


def seconds_since(instant: datetime | None) -> float:
    """How long ago it was; 0 if there is no such instant."""
    return max((utcnow() - instant).total_seconds(), 0.0) if instant is not None else 0.0


def processes_by_state(gauge: Instrument, rows: Iterable[Any]) -> Iterator[Sample]:
    """The number of processes that work, wait and are silent, by their heartbeats."""
    counts = {"working": 0, "waiting": 0, "silent": 0}
    for row in rows:
        counts["silent" if row.silent else "waiting" if row.waits_for else "working"] += 1
    return ((gauge, (state,), float(count)) for state, count in counts.items())
