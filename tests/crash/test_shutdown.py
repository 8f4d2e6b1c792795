"""SIGTERM under load: running work is finished, other work is left to other processes, the exit status is 0."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from django.db import OperationalError, connection, transaction

from exactly_once.process.loop import EXIT_SILENT
from tests.support import ROOT
from tests.support.crash.world import CONSUMER, RELAY
from tests.support.servers import FaultProxy

SIGNALLED_WHILE_WAITING = """
import faulthandler, random, signal
from exactly_once.process.loop import StopRequest

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
            world.wait_until(lambda consumer=consumer: consumer.has_said("consumer: stopping"), "it begins nothing any more")
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
    consumer = world.consumer(
        inbox={"SHUTDOWN_GRACE": 1, "CONCURRENCY": 1}, failpoint="sleep before inbox.store.sentinel.finish"
    )
    world.operate(3)
    world.wait_until(lambda: world.runs().total() > 0, "the handler is stuck")
    consumer.ask_to_end()

    assert consumer.ends() not in (0, -signal.SIGKILL), consumer.tail()
    assert world.inbox()["done"] == 0
    world.assert_nothing_went_wrong(world.drain())


SESSIONS_THAT_POLL = {"relay": 3, "consumer": 1}
"""Two lanes and the timer; one worker at a time."""


@contextmanager
def hanging_database(world, command):
    """The server processes of a command's sessions stand still, and its loops wait for their answers."""
    name = {"relay": RELAY, "consumer": CONSUMER}[command]
    stopped = {}

    def wake():
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        stopped.clear()

    def hangs():
        try:
            found = backends(name)
        except OperationalError:  # one was stopped while it wrote its row of pg_stat_activity, for whose end readers wait
            wake()
            return False
        for pid, port in found.items():
            stopped[pid] = port
            os.kill(pid, signal.SIGSTOP)
        return len(unanswered(stopped.values())) >= SESSIONS_THAT_POLL[command]

    try:
        world.wait_until(hangs, "it waits for the database")
        yield
    finally:
        wake()


def backends(name):
    """The server processes of the sessions of this name that poll, each with its client's port."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL statement_timeout = '5s'")
        cursor.execute(
            "SELECT pid, client_port FROM pg_stat_activity WHERE application_name = %s "
            "AND query_start - backend_start > interval '0.5 s'",
            [name],
        )
        return dict(cursor.fetchall())


def unanswered(client_ports):
    """Those of these clients that have sent the server something that it has not read."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, remote, _, queues = line.split()[1:5]
        if _port(local) == int(connection.settings_dict["PORT"]) and int(queues.partition(":")[2], 16):
            found.add(_port(remote))
    return found & set(client_ports)


def _port(address):
    return int(address.rpartition(":")[2], 16)


@pytest.mark.parametrize("command", ["relay", "consumer"])
def test_sigterm_ends_a_process_within_the_shutdown_grace_while_its_database_hangs(world, command):
    options = {"SHUTDOWN_GRACE": 1, "WATCHDOG": 1000}
    worker = getattr(world, command)(outbox=options, inbox=options)
    with hanging_database(world, command):
        worker.ask_to_end()

        assert worker.ends() == EXIT_SILENT, worker.tail()
    assert worker.has_said("asked to stop 1 s ago")


def test_second_sigterm_ends_a_relay_at_once_while_its_database_hangs(world):
    relay = world.relay(outbox={"SHUTDOWN_GRACE": 1000, "WATCHDOG": 1000})
    with hanging_database(world, "relay"):
        world.wait_until(lambda: relay.ask_to_end() or not relay.is_alive, "it has heard two of them")

        assert relay.ends() == 128 + signal.SIGTERM


def test_sigterm_ends_a_relay_within_the_shutdown_grace_whose_database_hangs_at_its_start(world):
    with FaultProxy("127.0.0.1", connection.settings_dict["PORT"]) as proxy:
        proxy.freeze()
        options = {"SHUTDOWN_GRACE": 1, "WATCHDOG": 1000}
        relay = world.relay(database_url=proxy.through(world.environment["DATABASE_URL"]), outbox=options)
        world.wait_until(lambda: relay.is_ready and proxy.connections, "it has asked the database something")
        relay.ask_to_end()

        assert relay.ends() == EXIT_SILENT, relay.tail()


def test_a_signal_at_any_instruction_sets_the_stop_request():
    """The handler runs between any two bytecodes of the main thread, also while that holds the lock of the stop request."""
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED_WHILE_WAITING], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )

    assert done.returncode == 0, done.stderr
