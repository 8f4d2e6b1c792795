"""Retry delays.

Exponential backoff with a cap and full jitter on its upper half (Brooker, "Exponential Backoff and Jitter", AWS Architecture
Blog, 2015). The delay is at least half of its nominal value, so that a documented series like "10 s, 30 s, 1 min" stays
readable. The jitter keeps processes from retrying in step.
"""

import random
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """The number of attempts, and the delays between them.

    Args:
        max_attempts: attempts in all, including the first; at least 1.
        base: delay after the first failed attempt.
        factor: each further failure multiplies the delay by it.
        cap: the longest delay.
    """

    max_attempts: int
    base: timedelta
    factor: float
    cap: timedelta

    def exhausted(self, attempt: int) -> bool:
        """Was `attempt` (counted from 1) the last one?"""
        return attempt >= self.max_attempts

    def delay(self, attempt: int) -> timedelta:
        """The delay after `attempt` (counted from 1) failed."""
        # In seconds and with a limited exponent: attempts of an unroutable message are not limited, and a timedelta and a float
        # would overflow.
        nominal = min(self.base.total_seconds() * self.factor ** min(attempt - 1, 64), self.cap.total_seconds())
        return timedelta(seconds=nominal * random.uniform(0.5, 1.0))


@dataclass
class Pause:
    """The wait for an unavailable dependency (a broker, a database): capped, with jitter, reset by its recovery."""

    first_seconds: float = 0.2
    cap_seconds: float = 10.0
    failures: int = 0

    def next_seconds(self) -> float:
        nominal = min(self.first_seconds * 2 ** min(self.failures, 16), self.cap_seconds)
        self.failures += 1
        return float(nominal * random.uniform(0.5, 1.0))

    def reset(self) -> None:
        self.failures = 0
