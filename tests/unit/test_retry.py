"""Retry delays: longer with each attempt, never above the cap, and with jitter."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactly_once.wire.retry import Pause, RetryPolicy

POLICY = RetryPolicy(max_attempts=16, base=timedelta(seconds=10), factor=2.0, cap=timedelta(hours=2))


@pytest.mark.parametrize(("attempt", "nominal"), [(1, 10), (2, 20), (3, 40), (10, 5120), (11, 7200), (1_000_000, 7200)])
def test_the_retry_delay_doubles_up_to_the_cap(attempt, nominal):
    delays = [POLICY.delay(attempt).total_seconds() for _ in range(200)]

    assert nominal / 2 <= min(delays)
    assert max(delays) <= nominal
    assert len(set(delays)) > 1


@given(st.integers(1, 10**9), st.timedeltas(timedelta(), timedelta(days=100)), st.timedeltas(timedelta(), timedelta(days=9)))
def test_a_retry_delay_is_never_negative_or_longer_than_the_cap(attempt, base, cap):
    delay = RetryPolicy(max_attempts=1, base=base, factor=3.0, cap=cap).delay(attempt)

    assert timedelta() <= delay <= cap


def test_a_pause_doubles_up_to_its_cap_and_starts_over_after_a_reset():
    pause = Pause(first_seconds=1.0, cap_seconds=8.0)

    nominal = [1, 2, 4, 8, 8, 8]
    taken = [pause.next_seconds() for _ in nominal]

    assert all(full / 2 <= seconds <= full for seconds, full in zip(taken, nominal, strict=True))
    pause.reset()
    assert 0.5 <= pause.next_seconds() <= 1


def test_a_pause_stays_at_its_cap_after_a_million_failures():
    pause = Pause(failures=10**6)

    assert 5.0 <= pause.next_seconds() <= 10.0
