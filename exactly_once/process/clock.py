"""The clocks of this process.

Guarantees depend on some instants (due, expiry, retry). These come from the database's clock, because every process of a
service shares it (`sql.now`). Deadlines and durations inside one process use `monotonic`, which cannot be set and keeps
running while the machine is suspended, as the database, the broker and the leases do. `awake` measures the time in which this
process could run; it stops during suspension.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial


def _boottime() -> Callable[[], float] | None:
    """Linux's clock that includes the time in suspension (clock_gettime(2)); None on other systems."""
    try:
        clock = time.CLOCK_BOOTTIME
        time.clock_gettime(clock)
    except (AttributeError, OSError):
        return None
    return partial(time.clock_gettime, clock)


monotonic = _boottime() or time.monotonic
awake = time.monotonic

utcnow = partial(datetime.now, tz=UTC)
"""This process's wall clock, aware, in UTC. Code that needs exact instants must not use it."""
