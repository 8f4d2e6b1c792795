"""The offset between the database's clock and that of this process, on the same machine.

Instants that are promised are the database's; arrivals are timed by `time.monotonic`, which cannot be set.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.lab.database import Database

READINGS = 200


@dataclass(frozen=True)
class DatabaseClock:
    """What the database's clock says at an instant of `time.monotonic`.

    Attributes:
        ahead: of `time.monotonic`, seconds.
        error: how far that may be wrong at most, seconds: half of the fastest query.
    """

    ahead: float
    error: float

    @classmethod
    def read(cls, database: Database) -> DatabaseClock:
        readings = []
        for _ in range(READINGS):
            asked = time.monotonic()
            told = database.now()
            answered = time.monotonic()
            readings.append(cls(ahead=told - (asked + answered) / 2, error=(answered - asked) / 2))
        return min(readings, key=lambda reading: reading.error)

    def at(self, monotonic: float) -> float:
        return monotonic + self.ahead

    def error_until(self, later: DatabaseClock) -> float:
        """The same bound for everything up to a later reading, between which one of the clocks may have been corrected."""
        return abs(later.ahead - self.ahead) + later.error
