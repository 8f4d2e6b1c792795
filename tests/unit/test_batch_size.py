"""A relay whose passes take too long takes fewer messages, and more again later; it logs this once a minute."""

import pytest

from outbox.relay.pass_size import BatchSize
from tests.support.clock import Clock

LARGEST = 500
A_MINUTE = 60.0


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def size(clock):
    return BatchSize(LARGEST, clock)


def sizes(size, passes):
    """The sizes of the next passes, all of which succeed."""
    found = []
    for _ in range(passes):
        size.succeeded()
        found.append(size.now)
    return found


def test_size_after_a_failure_grows_from_one_message(size):
    assert sizes(size, 3) == [LARGEST] * 3
    size.failed()

    assert size.now == 1
    assert sizes(size, 10) == [2, 4, 8, 16, 32, 64, 128, 256, 500, 500]


def test_size_after_a_pass_that_took_too_long_is_a_quarter_and_for_a_minute_at_most_half(size, clock):
    size.overdue("statement timeout")

    assert size.now == 125
    assert sizes(size, 3) == [250, 250, 250]
    clock.now += A_MINUTE
    assert sizes(size, 3) == [500, 500, 500]


def test_size_that_is_still_too_large_is_made_smaller_down_to_one_message(size):
    found = []
    for _ in range(6):
        size.overdue("statement timeout")
        found.append(size.now)

    assert found == [125, 31, 7, 1, 1, 1]


def test_pass_that_took_too_long_is_reported_once_a_minute(size, clock, caplog):
    for _ in range(10):
        size.overdue("statement timeout")
        clock.now += 1
    assert len(caplog.records) == 1
    assert "up to 500 messages took too long (statement timeout)" in caplog.text

    clock.now += A_MINUTE
    size.overdue("statement timeout")
    assert len(caplog.records) == 2
