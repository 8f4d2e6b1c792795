"""The last kept value of each figure: `last.json`, by benchmark and by the name of the series or the ratio."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.lab.record import Record, spread

FILE = Path(__file__).parents[1] / "last.json"
DIGITS = 5

Figures = Mapping[str, Mapping[str, Any]]
"""By name: median, minimum, maximum and the date of the run."""


def last_figures(benchmark: str) -> Figures:
    figures: Figures = _read().get(benchmark, {})
    return figures


def keep(record: Record) -> None:
    """Replace the kept figures of this benchmark."""
    day = datetime.now(tz=UTC).date().isoformat()
    values = {side: series.values for side, series in record.series.items()}
    values |= {ratio.name: record.of(ratio) for ratio in record.ratios}
    figures = {name: _rounded(runs) | {"date": day} for name, runs in values.items() if runs}
    _write({**_read(), record.name: figures})


def _read() -> dict[str, Figures]:
    benchmarks: dict[str, Figures] = json.loads(FILE.read_text())
    return benchmarks


def _rounded(runs: list[float]) -> dict[str, Any]:
    return {what: float(f"{value:.{DIGITS}g}") for what, value in spread(runs).items()}


def _write(benchmarks: Mapping[str, Figures]) -> None:
    """Write one line for each figure, so that a change shows what was measured again."""
    blocks = []
    for benchmark, figures in sorted(benchmarks.items()):
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(figure)}" for name, figure in figures.items())
        blocks.append(f"  {json.dumps(benchmark)}: {{\n{lines}\n  }}")
    FILE.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
