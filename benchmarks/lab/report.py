"""A record as a table of at most 100 columns, plain text, readable as it scrolls by."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from benchmarks.lab.last import Figures
from benchmarks.lab.record import Record, Verdict, spread

WIDTH = 100
NAME_WIDTH = 42
HEADINGS = f"{'median':>9} {'min':>9} {'max':>9} {'last':>9} runs"


def table(record: Record, last: Figures) -> str:
    """The figures of the record, the last kept median beside each."""
    return "\n".join(_lines(record, last))


def _lines(record: Record, last: Figures) -> Iterator[str]:
    yield ""
    yield f"== {record.name} ".ljust(WIDTH, "=")
    yield from textwrap.wrap(record.question, WIDTH)
    yield ""
    if record.series:
        yield f"{'side':<{NAME_WIDTH}} {HEADINGS}  unit"
    for side, series in record.series.items():
        yield f"{_fit(side)} {_numbers(series.values, last.get(side))}  {series.unit}"
    if record.ratios:
        yield ""
        yield f"{'ratio, run by run':<{NAME_WIDTH}} {HEADINGS}  reach"
    for ratio in record.ratios:
        yield f"{_fit(ratio.name)} {_numbers(record.of(ratio), last.get(ratio.name), ratio=True)}  {ratio.reach}"
    if record.verdicts or record.failure:
        yield ""
    yield from _verdicts(record.verdicts)
    if record.failure:
        yield from _wrapped("FAILED  ", record.failure)
    for note in record.notes:
        yield from _wrapped("note    ", note)
    if dates := sorted({figure["date"] for figure in last.values()}):
        yield from _wrapped("last    ", f"medians of {' and '.join(dates)}, from benchmarks/last.json")


def _verdicts(verdicts: list[Verdict]) -> Iterator[str]:
    by_side: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        by_side[verdict.side].append(verdict)
    for side, judged in by_side.items():
        good = sum(verdict.correct for verdict in judged)
        detail = next((verdict.detail for verdict in judged if not verdict.correct), judged[-1].detail)
        words = [f"{side}: {good} of {len(judged)} runs; {detail}"]
        words += _median("producer", [verdict.producer_rate for verdict in judged])
        words += _median("capacity", [verdict.capacity for verdict in judged])
        yield from _wrapped("correct " if good == len(judged) else "WRONG   ", "; ".join(words))


def _median(name: str, rates: list[float | None]) -> list[str]:
    known = [rate for rate in rates if rate is not None]
    return [f"{name} {median(known):,.0f}/s"] if known else []


def _numbers(values: list[float], last: Mapping[str, Any] | None, *, ratio: bool = False) -> str:
    numbers = [*spread(values).values(), last["median"] if last else None]
    return " ".join(f"{_number(number, ratio=ratio):>9}" for number in numbers) + f" {len(values):>4}"


def _number(value: float | None, *, ratio: bool) -> str:
    if value is None:
        return "-"
    if ratio:
        return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _fit(name: str) -> str:
    return textwrap.shorten(name, NAME_WIDTH, placeholder="…").ljust(NAME_WIDTH)


def _wrapped(first: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first))
