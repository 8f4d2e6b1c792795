"""Counts and durations of one process, by subject: a topic in the outbox, a handler in the inbox.

A duration is counted in one of a fixed number of buckets, each √2 times as long as the one before. The buckets of several
processes and minutes can be added, which percentiles cannot, and a percentile that is computed from them is off by at most a
fifth. The ideas are those of HdrHistogram (a bounded relative error) and of Prometheus' histograms (buckets that add up).

Counting only changes numbers in memory. The number of subjects is limited; further ones are summed as `OTHER`.

This module contains no table, see `upkeep.minutes`.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from exactly_once.process.clock import utcnow

ALL, OTHER = "", "*"
"""Subjects of sums. Neither can be a topic, see `wire.text.why_no_topic`."""
MOST_SUBJECTS = 50
_SHORTEST_SECONDS = 0.001
_BUCKETS = 48
BOUNDS = tuple(_SHORTEST_SECONDS * 2 ** (number / 2) for number in range(_BUCKETS))
"""In seconds, from 1 ms to 3 hours. Bucket 0 has the durations below the first bound, and bucket n those from bound n - 1."""

Histogram = Counter[int]
"""The number of durations in each bucket; empty buckets are left out."""


def bucket_of(seconds: float) -> int:
    return bisect_right(BOUNDS, seconds)


def percentile(histogram: Mapping[int, int], share: float) -> float | None:
    """The duration in seconds that `share` of the durations do not exceed, as the middle of its bucket; None without any."""
    left = share * sum(histogram.values())
    if not left:
        return None
    for bucket in sorted(histogram):
        left -= histogram[bucket]
        if left <= 0:
            break
    if bucket == 0:
        return BOUNDS[0] / 2
    return float(BOUNDS[bucket - 1] * (2**0.25 if bucket < _BUCKETS else 1))


@dataclass
class Counted:
    """What was counted of one subject."""

    counts: Counter[str] = field(default_factory=Counter)
    times: dict[str, Histogram] = field(default_factory=dict)

    def add(self, other: Counted) -> None:
        self.counts.update(other.counts)
        for name, histogram in other.times.items():
            self.times.setdefault(name, Counter()).update(histogram)


class Tally:
    """What this process has counted for one database since it was last taken. Any thread may count.

    Attributes:
        ahead: how far the database's clock is ahead of this process's; None while that is unknown.
    """

    def __init__(self) -> None:
        self.ahead: timedelta | None = None
        self._lock = threading.Lock()
        self._subjects: dict[str, Counted] = {}

    @property
    def is_empty(self) -> bool:
        return not self._subjects

    def now(self) -> datetime | None:
        """The database's clock, as far as it is known."""
        return None if self.ahead is None else utcnow() + self.ahead

    def count(self, subject: str, name: str, amount: int = 1) -> None:
        with self._lock:
            (self._subjects.get(subject) or self._of(subject)).counts[name] += amount

    def time(self, subject: str, name: str, seconds: Iterable[float]) -> None:
        """Count durations. A negative one, by clocks that differ, counts as zero."""
        with self._lock:
            times = (self._subjects.get(subject) or self._of(subject)).times
            if name not in times:
                times[name] = Counter()
            for each in seconds:
                times[name][bucket_of(each)] += 1

    def take(self) -> dict[str, Counted]:
        """What was counted, by subject, and count from zero again."""
        with self._lock:
            taken, self._subjects = self._subjects, {}
        return taken

    def put_back(self, taken: Mapping[str, Counted]) -> None:
        """Count again what was taken and could not be written."""
        with self._lock:
            for subject, counted in taken.items():
                self._of(subject).add(counted)

    def _of(self, subject: str) -> Counted:
        if subject not in self._subjects:
            if len(self._subjects) >= MOST_SUBJECTS:
                subject = OTHER
            self._subjects.setdefault(subject, Counted())
        return self._subjects[subject]


def total(counted: Iterable[Counted]) -> Counted:
    """The sum of all subjects."""
    found = Counted()
    for each in counted:
        found.add(each)
    return found
