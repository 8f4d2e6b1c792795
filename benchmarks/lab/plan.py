"""The size of the measurements: full, or just enough to see that everything works."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """How many interleaved runs, whether they are small ones, and for how many minutes an endurance run goes on.

    Attributes:
        history, live: rows for `pages`, instead of its own choice.
    """

    runs: int
    quick: bool
    minutes: float
    history: int | None = None
    live: int | None = None

    def choose(self, full: T, quick: T) -> T:
        return quick if self.quick else full

    def each_run(self, benchmark: str) -> Iterator[int]:
        """1, 2, 3…, with a line of progress for each."""
        for run in range(1, self.runs + 1):
            say(f"{benchmark}: run {run} of {self.runs}")
            yield run


def say(text: str) -> None:
    print(f"  … {text}", flush=True)
