"""Wait for a condition, instead of for a time to pass."""

from __future__ import annotations

import time

A_WHILE = 60.0
"""How many seconds a condition may take to come true before the test gives up on it."""
TICK = 0.01


def wait_until(condition, within=A_WHILE):
    """The result of `condition` when it came true."""
    deadline = time.monotonic() + within
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"waited {within} s in vain"
        time.sleep(TICK)
    return answer
