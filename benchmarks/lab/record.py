"""The results of a benchmark: series of figures, ratios of two series run by run, and verdicts on correctness.

Every figure is recorded. A ratio is computed within each run, under the same load of the machine, and its median
counts; the ratio of two medians would compare different minutes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any


class Incorrect(Exception):
    """A relay lost, doubled, invented or reordered messages. Only this fails a benchmark."""


@dataclass
class Series:
    """One side's figures, one per run, in `unit`."""

    unit: str
    values: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {"unit": self.unit, "runs": self.values, **spread(self.values)}


@dataclass(frozen=True)
class Ratio:
    """`over / under`, run by run. `reach` is the target, for the reader; it is not asserted."""

    name: str
    over: str
    under: str
    reach: str = ""


@dataclass(frozen=True)
class Verdict:
    """The outcome of the messages of one side in one run.

    Attributes:
        side: which series.
        correct: every committed message arrived exactly once and in the order of its key.
        detail: what was counted, or what is wrong.
        producer_rate: committed messages per second, of the producer.
        capacity: relayed messages per second.
    """

    side: str
    correct: bool
    detail: str
    producer_rate: float | None = None
    capacity: float | None = None


@dataclass
class Record:
    """All results of one benchmark."""

    name: str
    question: str
    series: dict[str, Series] = field(default_factory=dict)
    ratios: list[Ratio] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    failure: str = ""

    def add(self, side: str, value: float, unit: str) -> None:
        self.series.setdefault(side, Series(unit)).values.append(value)

    def compare(self, over: str, under: str, *, reach: str = "", name: str = "") -> None:
        self.ratios.append(Ratio(name or f"{over} / {under}", over, under, reach))

    def mention(self, verdict: Verdict) -> None:
        """Record the verdict on the run of a peer, whatever it is."""
        self.verdicts.append(verdict)

    def judge(self, verdict: Verdict) -> None:
        """Record the verdict on one of our own runs.

        Raises:
            Incorrect: it is not correct; the rate of an incorrect run has no meaning.
        """
        self.mention(verdict)
        if not verdict.correct:
            raise Incorrect(f"{self.name}, {verdict.side}: {verdict.detail}")

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def of(self, ratio: Ratio) -> list[float]:
        """The ratio in each run; an interrupted run has none."""
        over, under = (self.series[side].values if side in self.series else [] for side in (ratio.over, ratio.under))
        return [a / b for a, b in zip(over, under, strict=False) if b]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "question": self.question,
            "series": {side: series.as_json() for side, series in self.series.items()},
            "ratios": [
                {"name": ratio.name, "reach": ratio.reach, "runs": self.of(ratio), **spread(self.of(ratio))}
                for ratio in self.ratios
            ],
            "verdicts": [vars(verdict) for verdict in self.verdicts],
            "notes": self.notes,
            "details": self.details,
            "failure": self.failure,
        }


def spread(values: list[float]) -> dict[str, float | None]:
    if not values:
        return {"median": None, "min": None, "max": None}
    return {"median": median(values), "min": min(values), "max": max(values)}


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that this percentage of all values does not exceed (nearest rank)."""
    ranked = sorted(values)
    rank = max(1, -(-len(ranked) * percent // 100))
    return ranked[int(rank) - 1]
