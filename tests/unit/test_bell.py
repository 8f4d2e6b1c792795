"""`Bell`: a loop waits on it for new work and for a stop request at the same time."""

import signal
import threading

import pytest

from exactly_once.process.loop import Bell, StopRequest
from tests.support.deliveries import InAThread

FOR_EVER = 3600.0
AT_ONCE = 0.0


@pytest.fixture
def stop():
    return StopRequest()


@pytest.fixture
def bell():
    return Bell()


def result_of_waiting_while(bell, stop, do):
    """What a wait in another thread returns when this thread calls `do` meanwhile."""
    with InAThread(lambda: bell.wait(FOR_EVER, stop)) as waiting:
        do()
    return waiting.answer


def test_a_ring_wakes_a_waiting_loop(bell, stop):
    assert result_of_waiting_while(bell, stop, bell.ring) is True


def test_a_stop_request_wakes_a_waiting_loop_and_does_not_count_as_a_ring(bell, stop):
    assert result_of_waiting_while(bell, stop, stop.set) is False


def test_waiting_for_a_ring_ends_after_its_timeout(bell, stop):
    assert bell.wait(0.001, stop) is False


def test_any_number_of_rings_before_a_wait_count_as_one_and_never_block(bell, stop):
    for _ in range(100_000):  # more than a pipe holds
        bell.ring()

    assert bell.wait(FOR_EVER, stop) is True
    assert bell.wait(AT_ONCE, stop) is False


def test_a_pending_ring_is_reported_although_a_stop_was_requested(bell, stop):
    stop.set()
    bell.ring()

    assert bell.wait(FOR_EVER, stop) is True


def test_two_bells_do_not_consume_each_others_rings(stop):
    """A loop that consumed the ring of another would leave that one waiting."""
    one, other = Bell(), Bell()
    for bell in (one, other):
        bell.ring()

    assert one.wait(FOR_EVER, stop) is True
    assert other.wait(FOR_EVER, stop) is True


def test_a_ring_from_a_signal_handler_wakes_the_wait_of_the_same_thread(bell, stop):
    before = signal.signal(signal.SIGUSR1, lambda *_: bell.ring())
    try:
        threading.Timer(0.05, signal.pthread_kill, [threading.get_ident(), signal.SIGUSR1]).start()
        assert bell.wait(FOR_EVER, stop) is True
    finally:
        signal.signal(signal.SIGUSR1, before)
