"""A benchmark that waits for what cannot come says so, and does not sit out a time limit."""

import sys
from contextlib import closing, suppress

import pytest

from benchmarks.lab.processes import Process, ProcessFailed
from benchmarks.lab.waiting import LOOK_SECONDS, StallDetector
from tests.support.clock import Clock

LIMIT = 30.0


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def detector(clock):
    return StallDetector(clock, LIMIT)


def test_a_number_that_stays_the_same_is_stalled_when_its_time_is_over(clock, detector):
    assert not detector.stalled(7)
    clock.now += LIMIT - 0.1
    assert not detector.stalled(7)
    clock.now += 0.1
    assert detector.stalled(7)


def test_the_remaining_work_is_looked_at_only_while_nothing_changes(clock, detector):
    for number in range(10):
        clock.now += LOOK_SECONDS - 0.1
        detector.stalled(number)
        assert not detector.look_due()
    clock.now += LOOK_SECONDS
    detector.stalled(9)
    assert detector.look_due()
    assert not detector.look_due()


def run_to_the_end(code, **options):
    """A process of the benchmarks that has ended, whatever its status."""
    process = Process([sys.executable, "-c", code], {}, **options)
    with suppress(ProcessFailed):
        process.finish()
    return closing(process)


def test_process_expected_to_keep_running_fails_when_it_exits():
    with run_to_the_end("") as relay, pytest.raises(ProcessFailed, match="ended with 0"):
        relay.check()


def test_a_process_that_ends_by_itself_may_end_but_not_fail():
    with run_to_the_end("", ends=True) as publisher:
        publisher.check()
    failing = run_to_the_end("import sys; sys.exit('refused by the broker')", ends=True)
    with failing as publisher, pytest.raises(ProcessFailed, match=r"ended with 1:\n.*refused by the broker"):
        publisher.check()
