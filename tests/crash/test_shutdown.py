"""SIGTERM under load: running work is finished, other work is left to other processes, the exit status is 0."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support import ROOT

SIGNALLED_WHILE_WAITING = """
import faulthandler, random, signal
from outbox.kernel.loop import StopRequest

signal.signal(signal.SIGALRM, lambda *_: stop.set())
for _ in range(20_000):
    faulthandler.dump_traceback_later(60, exit=True)
    stop = StopRequest()
    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 60e-6))
    while not stop:
        stop.wait(0.00001)
"""


@pytest.mark.parametrize("victim", ["relay", "consumer"])
def test_sigterm_under_load_ends_a_process_with_status_0_and_loses_nothing(world, victim):
    workers = {"relay": world.relay(), "consumer": world.consumer()}
    with world.load(producers=3):
        for _ in range(3):
            world.flows()
            world.wait_until(lambda: workers[victim].is_ready, "it listens to SIGTERM")
            workers[victim].ask_to_end()

            # A process that needs longer than SHUTDOWN_GRACE ends with another status than 0.
            assert workers[victim].ends() == 0, workers[victim].tail()
            workers[victim] = world.again(workers[victim])
    world.assert_nothing_went_wrong(world.drain())


def test_sigterm_leaves_no_message_to_be_run_twice(world):
    """Unlike after a kill, what ran is acknowledged, and what was only prefetched is requeued without having been run."""
    world.relay()
    world.operate(120, how="held")
    for _ in range(4):
        before = world.deliveries().total()
        with world.held():
            consumer = world.consumer()
            world.wait_until(lambda before=before: world.deliveries().total() >= before + 20, "it has more than it can run")
            consumer.ask_to_end()
            world.wait_until(lambda consumer=consumer: consumer.has_said("Stopping"), "it begins nothing any more")
        assert consumer.ends() == 0, consumer.tail()
    found = world.drain()

    assert world.redelivered() > 0, "nothing was prefetched, so nothing was given back"
    assert max(world.runs().values()) == 1
    world.assert_nothing_went_wrong(found)


@pytest.mark.every_database
def test_sigterm_under_load_ends_a_process_without_a_broker_and_loses_nothing(local_world):
    worker = local_world.relay()
    with local_world.load(producers=2):
        for _ in range(3):
            local_world.flows(10)
            worker.ask_to_end()
            assert worker.ends() == 0, worker.tail()
            worker = local_world.again(worker)
    local_world.assert_nothing_went_wrong(local_world.drain())


def test_a_handler_that_outlasts_the_shutdown_grace_is_rolled_back_and_run_again(world):
    """When the grace ends, the process exits without a commit and without an ack, so another process runs the message."""
    world.relay()
    consumer = world.consumer(inbox={"SHUTDOWN_GRACE": 1, "CONCURRENCY": 1}, failpoint="sleep before inbox.store.finish")
    world.operate(3)
    world.wait_until(lambda: world.runs().total() > 0, "the handler is stuck")
    consumer.ask_to_end()

    assert consumer.ends() not in (0, -signal.SIGKILL), consumer.tail()
    assert world.inbox()["done"] == 0
    world.assert_nothing_went_wrong(world.drain())


def test_a_signal_at_any_instruction_sets_the_stop_request():
    """The handler runs between any two bytecodes of the main thread, also while that holds the lock of the stop request."""
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED_WHILE_WAITING], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )

    assert done.returncode == 0, done.stderr
