"""The clocks of this process.

Instants that a promise rests on (due, expiry, retry) come from the database's clock, because every process of a service
shares it (`database.now`). Deadlines and durations inside one process are measured with `monotonic`, which cannot be set and
goes on while the machine is suspended, as the database, the broker and the leases do. What this process itself has had time to
do is measured with `awake`, which stands still meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial


def _boottime() -> Callable[[], float] | None:
    """Linux's clock that counts the time in suspension, too (clock_gettime(2)); None where there is none."""
    try:
        clock = time.CLOCK_BOOTTIME
        time.clock_gettime(clock)
    except (AttributeError, OSError):
        return None
    return partial(time.clock_gettime, clock)


monotonic = _boottime() or time.monotonic
awake = time.monotonic


def utcnow() -> datetime:
    """This process's wall clock, aware, in UTC. Nothing that must be exact may rest on it."""
    return datetime.now(tz=UTC)
