"""When to try again.

Exponential back-off with a cap and full jitter on its upper half (Brooker, "Exponential Backoff and Jitter", AWS
Architecture Blog, 2015): the delay never falls below half of its nominal value, so that a promise like "10 s, 30 s, 1 min"
stays readable, and never lines two processes up.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often a message is tried and how long it rests in between.

    Args:
        max_attempts: tries in all, the first included; at least 1.
        base: rest after the first failed attempt.
        factor: what each further failure multiplies the rest by.
        cap: the longest rest.
    """

    max_attempts: int
    base: timedelta
    factor: float
    cap: timedelta

    def exhausted(self, attempt: int) -> bool:
        """Was `attempt` (counted from 1) the last one?"""
        return attempt >= self.max_attempts

    def delay(self, attempt: int) -> timedelta:
        """The rest after `attempt` (counted from 1) failed."""
        # In seconds and with a bounded exponent: an unroutable message never runs out of attempts, and both a timedelta and a
        # float overflow long before it does.
        nominal = min(self.base.total_seconds() * self.factor ** min(attempt - 1, 64), self.cap.total_seconds())
        return timedelta(seconds=nominal * random.uniform(0.5, 1.0))


@dataclass
class Pause:
    """How long to wait for something that is unavailable (a broker, a database): capped, jittered, reset by its return."""

    first_seconds: float = 0.2
    cap_seconds: float = 10.0
    failures: int = 0

    def next_seconds(self) -> float:
        nominal = min(self.first_seconds * 2 ** min(self.failures, 16), self.cap_seconds)
        self.failures += 1
        return float(nominal * random.uniform(0.5, 1.0))

    def reset(self) -> None:
        self.failures = 0
