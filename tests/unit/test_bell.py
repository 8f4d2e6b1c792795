"""What a loop waits on when it wants to hear of work as well as of its end."""

import signal
import threading

import pytest

from outbox.kernel.loop import Bell, StopRequest

FOR_EVER = 3600.0
AT_ONCE = 0.0


@pytest.fixture
def stop():
    return StopRequest()


@pytest.fixture
def bell():
    return Bell()


def waiting_beside(bell, stop, do):
    """What a wait in another thread answers when `do` happens."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(bell.wait(FOR_EVER, stop)))
    thread.start()
    do()
    thread.join()
    return answers


def test_a_ring_wakes_the_loop_that_waits(bell, stop):
    assert waiting_beside(bell, stop, bell.ring) == [True]


def test_a_stop_request_wakes_the_loop_that_waits_and_is_no_ring(bell, stop):
    assert waiting_beside(bell, stop, stop.set) == [False]


def test_without_either_waiting_ends_by_itself(bell, stop):
    assert bell.wait(0.001, stop) is False


def test_a_ring_before_the_wait_is_not_lost(bell, stop):
    bell.ring()

    assert bell.wait(FOR_EVER, stop) is True


def test_many_rings_are_one(bell, stop):
    for _ in range(1000):
        bell.ring()

    assert bell.wait(FOR_EVER, stop) is True
    assert bell.wait(AT_ONCE, stop) is False


def test_ringing_never_blocks_however_long_nobody_waits(bell, stop):
    for _ in range(100_000):  # more than a pipe holds
        bell.ring()

    assert bell.wait(FOR_EVER, stop) is True


def test_a_ring_is_heard_though_a_stop_is_wanted_too(bell, stop):
    stop.set()
    bell.ring()

    assert bell.wait(FOR_EVER, stop) is True


def test_each_loop_has_its_own(stop):
    """One that took the other's ring would leave it asleep."""
    one, other = Bell(), Bell()
    for bell in (one, other):
        bell.ring()

    assert one.wait(FOR_EVER, stop) is True
    assert other.wait(FOR_EVER, stop) is True


def test_it_may_be_rung_from_a_signal_handler_while_the_same_thread_waits(bell, stop):
    before = signal.signal(signal.SIGUSR1, lambda *_: bell.ring())
    try:
        threading.Timer(0.05, signal.pthread_kill, [threading.get_ident(), signal.SIGUSR1]).start()
        assert bell.wait(FOR_EVER, stop) is True
    finally:
        signal.signal(signal.SIGUSR1, before)
