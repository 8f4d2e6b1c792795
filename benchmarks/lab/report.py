"""A record as a table of at most 100 columns, plain text, readable as it scrolls by."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from benchmarks.lab.record import Record, Verdict, spread

WIDTH = 100
NAME_WIDTH = 46


def table(record: Record) -> str:
    return "\n".join(_lines(record))


def _lines(record: Record) -> Iterator[str]:
    yield ""
    yield f"== {record.name} ".ljust(WIDTH, "=")
    yield from textwrap.wrap(record.question, WIDTH)
    yield ""
    if record.series:
        yield f"{'side':<{NAME_WIDTH}} {'median':>10} {'min':>10} {'max':>10} {'runs':>5}  unit"
    for side, series in record.series.items():
        yield f"{_fit(side)} {_numbers(series.values)} {len(series.values):>5}  {series.unit}"
    if record.ratios:
        yield ""
        yield f"{'ratio, run by run':<{NAME_WIDTH}} {'median':>10} {'min':>10} {'max':>10} {'runs':>5}  reach"
    for ratio in record.ratios:
        values = record.of(ratio)
        yield f"{_fit(ratio.name)} {_numbers(values, ratio=True)} {len(values):>5}  {ratio.reach}"
    if record.verdicts or record.failure:
        yield ""
    yield from _verdicts(record.verdicts)
    if record.failure:
        yield from _wrapped("FAILED  ", record.failure)
    for note in record.notes:
        yield from _wrapped("note    ", note)


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


def _numbers(values: list[float], *, ratio: bool = False) -> str:
    return " ".join(f"{_number(value, ratio=ratio):>10}" for value in spread(values).values())


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
