"""A handler's `timeout`: a longer run is a failed attempt, and its interruption never hits a later run."""

import asyncio
import contextlib
import gc
import random
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from itertools import pairwise

import pytest
from asgiref.sync import sync_to_async
from django.db import DatabaseError

from inbox.errors import HandlerTimeout
from inbox.handlers import timeouts
from inbox.handlers.timeouts import bounded
from inbox.models import InboxMessage
from inbox.states import Outcome, State
from tests.support.apps.effects.models import Effect
from tests.support.apps.workshop import BOUNDED
from tests.support.deliveries import (
    A_WHILE,
    InAThread,
    an_envelope,
    deliver,
    drain,
    effects,
    make_due,
    options,
    the_effect,
    the_row,
)
from tests.support.loads import receive_together
from tests.support.sql import executed, fetched
from tests.support.threads import in_threads
from tests.support.workers import broker_options, declare, handler_of_the_workers, length_of, send

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

every_database = pytest.mark.every_database

LIMIT = timedelta(seconds=0.2)
LONGER = timedelta(seconds=1)
"""For a handler that must have begun before its timeout."""
AMPLE = timedelta(seconds=A_WHILE)
"""For a handler that must end in time even when the machine stalls."""
SHORT = timedelta(milliseconds=200)


@pytest.fixture(autouse=True)
def _no_garbage_collector():
    """Python ignores a timeout that strikes in code that the collector calls, and pytest reports that.

    Such code is left behind by other tests: Hypothesis measures collections, and an executor ends its threads.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def spin(seconds):
    """Run pure Python for so long."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def runs_of_this_thread():
    """The runs of this thread that the alarm watches; to be called with its lock held."""
    return [run for run in timeouts._monitor._items if run.thread == threading.get_ident()]


def reach_the_timeout():
    """Let the timeout of the calling run, and of no other, expire; the run is interrupted here."""
    with timeouts._monitor._changed:
        for run in runs_of_this_thread():
            run.ends_at = 0.0
        timeouts._monitor._changed.notify()
    spin(A_WHILE)


def loops(message):
    the_effect(message)
    while True:
        pass


def catches_exceptions(message):
    the_effect(message)
    while True:
        with contextlib.suppress(Exception):
            spin(0.01)


def sleeps_by_the_millisecond(message):
    the_effect(message)
    while True:
        time.sleep(0.001)


async def awaits(message):
    await Effect.objects.acreate(name=message.biz_id)
    await asyncio.sleep(A_WHILE)


async def awaits_and_cleans_up(message):
    await Effect.objects.acreate(name=message.biz_id)
    try:
        await asyncio.sleep(A_WHILE)
    finally:
        await Effect.objects.acreate(name="cleaned up")


async def blocks_the_thread_of_the_transaction(message):
    await Effect.objects.acreate(name=message.biz_id)
    await sync_to_async(spin)(A_WHILE)


@every_database
@pytest.mark.long
class TestSlowHandler:
    @pytest.mark.parametrize(
        "handle",
        [
            loops,
            catches_exceptions,
            sleeps_by_the_millisecond,
            awaits,
            awaits_and_cleans_up,
            blocks_the_thread_of_the_transaction,
        ],
        ids=lambda handle: handle.__name__,
    )
    def test_handler_past_its_timeout_is_a_failed_attempt_without_an_effect(self, handles, handle, monkeypatch):
        if handle in {awaits, awaits_and_cleans_up}:
            # They end by themselves. With a short grace, a stall would have them interrupted before they can.
            monkeypatch.setattr(timeouts, "_CANCEL_GRACE_SECONDS", A_WHILE)
        handler = handles(handle, name="tests.slow", timeout=LONGER)

        assert deliver(handler) is Outcome.STORED

        row = the_row()
        assert (row.state, row.attempts, effects()) == (State.RETRYING, 1, 0)
        assert row.last_error == "HandlerTimeout: tests.slow took longer than its timeout of 1 s"
        # A run interrupted while it waits for the coroutine's own thread shows nothing of the coroutine.
        assert handle.__name__ in row.traceback or handle is blocks_the_thread_of_the_transaction

    def test_timeout_of_one_handler_does_not_interrupt_others_of_its_process(self, handles):
        slow = handles(loops, timeout=LIMIT)
        patient = handles(lambda message: (time.sleep(3 * LIMIT.total_seconds()), the_effect(message)), timeout=AMPLE)

        with InAThread(lambda: deliver(patient)) as other:
            assert deliver(slow) is Outcome.STORED

        assert other.answer is Outcome.HANDLED
        assert effects() == 1

    def test_coroutine_that_raises_timeout_error_keeps_its_own_error(self, handles):
        async def fails(message):
            raise TimeoutError("the supplier did not answer")

        deliver(handles(fails, timeout=AMPLE))

        assert the_row().last_error == "TimeoutError: the supplier did not answer"


class TestSlowStatement:
    """PostgreSQL cancels the statement: a Python exception cannot reach a thread that waits for a socket in C."""

    @pytest.mark.parametrize("swallows", [False, True])
    def test_statement_past_the_timeout_is_cancelled(self, handles, swallows):
        def handle(message):
            the_effect(message)
            with contextlib.suppress(*[DatabaseError] * swallows):
                executed("SELECT pg_sleep(60)")

        assert deliver(handles(handle, timeout=LIMIT)) is Outcome.STORED

        assert (the_row().state, effects()) == (State.RETRYING, 0)
        assert "took longer than its timeout" in the_row().last_error

    @pytest.mark.long
    def test_timeout_among_short_statements_leaves_the_connection_usable(self, handles):
        def handle(message):
            the_effect(message)
            while True:
                executed("SELECT pg_sleep(0.001)")

        slow, quick = handles(handle, timeout=LIMIT), handles(the_effect)
        for _ in range(5):
            assert deliver(slow) is Outcome.STORED
            assert deliver(quick) is Outcome.HANDLED

        assert effects() == 5

    def test_statement_timeout_does_not_outlast_its_message(self, handles):
        shown = []

        def handle(message):
            shown.append(fetched("SHOW statement_timeout"))

        deliver(handles(handle, timeout=timedelta(seconds=7)))
        deliver(handles(handle))

        assert shown == ["7s", "0"]


class TestBatchAndGroup:
    def test_timeout_of_a_group_applies_to_each_call(self, handles):
        ends = []

        def handle(message):
            with timeouts._monitor._changed:
                ends.extend(run.ends_at for run in runs_of_this_thread())
            spin(LIMIT.total_seconds())
            the_effect(message)

        became = receive_together(handles(handle, timeout=AMPLE, group_commit=5), [an_envelope() for _ in range(5)])

        assert became == [Outcome.HANDLED] * 5
        assert len(ends) == 5
        assert all(later - earlier >= LIMIT.total_seconds() for earlier, later in pairwise(ends)), (
            "each run has the whole limit"
        )

    def test_timeout_of_a_batch_applies_to_the_whole_call(self, handles):
        ends = []

        def handle(messages):
            ends.append([])
            for message in messages:
                with timeouts._monitor._changed:
                    ends[-1].extend(run.ends_at for run in runs_of_this_thread())
                the_effect(message)
                if message.payload.get("slow"):
                    reach_the_timeout()

        handler = handles(handle, timeout=AMPLE, size=4)

        became = receive_together(handler, [an_envelope({"slow": number == 2}) for number in range(4)])

        assert became == [Outcome.HANDLED, Outcome.HANDLED, Outcome.STORED, Outcome.HANDLED]
        assert effects() == 3
        assert len(ends[0]) == 3, "the first call reached the slow message"
        assert [len(set(of_a_call)) for of_a_call in ends] == [1] * len(ends), "one timeout for the whole call"


@pytest.mark.long
class TestTimeoutAtTheEndOfARun:
    """A handler may end just at its timeout: it is interrupted inside its run or not at all."""

    @pytest.fixture
    def _switching_all_the_time(self):
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        yield
        sys.setswitchinterval(before)

    @pytest.mark.usefixtures("_switching_all_the_time")
    def test_timeout_at_the_end_of_a_run_interrupts_inside_the_run_or_not_at_all(self):
        limit, astray, ended = 0.002, [], {True: 0, False: 0}

        def run(dice):
            until = time.monotonic() + 4
            while time.monotonic() < until:
                try:
                    in_time = True
                    try:
                        with bounded("it", timedelta(seconds=limit)):
                            spin(limit * dice.uniform(0.7, 1.1))
                    except HandlerTimeout:
                        in_time = False
                    ended[in_time] += 1
                    spin(limit / 4)
                except BaseException as error:  # noqa: BLE001 - it is what must not be
                    astray.append(error)

        with in_threads(*(partial(run, random.Random(seed)) for seed in range(5))):  # their end: every lock was let go
            pass

        assert astray == []
        assert min(ended.values()) > 0, "none ended near its limit"

    @every_database
    def test_timeout_at_the_end_of_a_run_leaves_every_effect_once(self, handles):
        dice, limit = random.Random(7), 0.02

        def handle(message):
            the_effect(message)
            if message.attempt == 1:
                spin(limit * dice.uniform(0, 1.2))

        handler = handles(handle, timeout=timedelta(seconds=limit))
        envelopes = [an_envelope() for _ in range(100)]
        # On a busy machine a run without any spin may exceed so short a limit as well, many times.
        given = options(MAX_ATTEMPTS=1000)

        became = [deliver(handler, envelope, given=given) for envelope in envelopes]

        assert effects() == became.count(Outcome.HANDLED)
        assert became.count(Outcome.STORED) == 100 - effects()
        while make_due():
            drain(given)
        assert sorted(Effect.objects.values_list("name", flat=True)) == sorted(envelope.biz_id for envelope in envelopes)


def test_handler_that_cannot_be_interrupted_ends_its_process_and_its_attempts_count(a_process, rabbitmq_url, rabbitmq_server):
    handler = handler_of_the_workers(BOUNDED, BOUNDED)
    # One thread: a second one would claim the row again if the first stalled between claiming and locking it.
    given = {"MAX_ATTEMPTS": 1, "REDELIVERY_AFTER": SHORT, "CONCURRENCY": 1}
    declare(handler, broker_options(rabbitmq_url))
    send(rabbitmq_url, BOUNDED, {"do": "hear nothing"}, message_id="deaf")
    with a_process("inbox_consume", app="workshop", **given) as process:
        deaths = process.restarted_until(lambda: InboxMessage.objects.filter(state=State.DEAD).exists())
        send(rabbitmq_url, BOUNDED, {}, message_id="sound")
        process.until(lambda: effects("sound") == 1 and length_of(rabbitmq_server, handler, broker_options(rabbitmq_url)) == 0)

    assert set(process.exits) == {70}
    # The first delivery ends the process before its attempt is counted. After the last attempt one more is granted.
    assert deaths == 3
    assert (the_row(message_id="deaf").attempts, effects("deaf")) == (2, 0)
    assert "cannot be interrupted" in process.said()


@pytest.mark.django_db(databases=["default"])
def test_run_in_a_callers_transaction_leaves_no_limit_that_ends_its_session(handles):
    """As a test case is: it may stand at a breakpoint afterwards."""
    within = []
    handler = handles(lambda message: within.append(fetched("SHOW statement_timeout")), timeout=LONGER)

    assert deliver(handler) is Outcome.HANDLED
    assert (within, fetched("SHOW idle_in_transaction_session_timeout")) == (["1s"], "0")
