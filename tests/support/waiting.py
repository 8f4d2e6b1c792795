"""Wait for a condition, instead of for a time to pass."""

import time

A_WHILE = 60.0
"""How many seconds a condition may take to come true before the test gives up on it."""
TICKS = (0.01, 0.05)
"""The shortest and the longest time between two looks at a condition: with many waiting tests on few processors, looking takes
most of the time."""


def wait_until(condition, within=A_WHILE, report=str):
    """The result of `condition` when it came true."""
    began_at = time.monotonic()
    shortest, longest = TICKS
    while not (answer := condition()):
        waited = time.monotonic() - began_at
        assert waited < within, f"waited {within} s in vain {report()}"
        time.sleep(min(max(waited / 20, shortest), longest))
    return answer


def pass_by(seconds):
    """The test is that nothing happens for this long."""
    until = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > until)


def wait_until_reached(goal, count, within=A_WHILE):
    """Wait until `count()` is `goal` or more; `within` is for each step on the way, however small."""
    reached = count()
    while reached < goal:
        before = reached
        reached = wait_until(lambda before=before: (now := count()) > before and now, within)
