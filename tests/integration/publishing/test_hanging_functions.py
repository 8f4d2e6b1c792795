"""Checkers and callbacks that hang: each is reported once and delays only its own messages or calls."""

from collections import Counter
from datetime import timedelta

import pytest

from outbox import Answer, checker, prepare
from outbox.callbacks import checkers
from outbox.models import PendingCallback
from outbox.operators.relays import hanging
from outbox.states import State
from tests.support.apps.effects.models import Effect
from tests.support.apps.stalling import CHECKED, CHECKED_IN_VAIN, HANGING, QUICK, WAITING
from tests.support.relaying import published, row_of, state_of
from tests.support.sql import executed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

RELAY = "outbox_relay"
A_LONG_TIME = 100
"""In seconds: longer than any of these tests."""


@pytest.fixture(autouse=True)
def _topics_with_a_checker(settings):
    """`prepare` asks for one in its own process; it is asked in the relay's, and at once."""
    settings.OUTBOX = {"CHECKS": {"AFTER": timedelta(milliseconds=1)}}
    topics = (CHECKED, CHECKED_IN_VAIN)
    for topic in topics:
        checker(topic)(lambda message: Answer.UNKNOWN)
    yield
    for topic in topics:
        checkers.remove(topic)


@pytest.fixture
def gate(tmp_path):
    """While this file is there, callbacks of WAITING do not return."""
    place = tmp_path / "gate"
    place.touch()
    return place


@pytest.fixture
def begun(tmp_path):
    """The number of calls of a function, by biz-id."""

    def counted():
        place = tmp_path / "runs"
        return Counter(place.read_text().splitlines()) if place.exists() else Counter()

    return counted


@pytest.fixture
def relay(command, peer, tmp_path):
    """Start `outbox_relay` with these options; durations are in seconds."""
    places = {name: str(tmp_path / name.lower()) for name in ("RUNS", "GATE")}
    variables = {"BROKER_URL": peer.url, "PGAPPNAME": RELAY, **places}
    return lambda log="", **options: command(RELAY, app="stalling", log=log, variables=variables, OUTBOX=options)


def sessions_of_the_relay(state):
    found = executed("SELECT pid FROM pg_stat_activity WHERE application_name = %s AND state = %s", [RELAY, state])
    return [pid for (pid,) in found]


def effects():
    return list(Effect.objects.values_list("name", "detail"))


def wait_until_claimed_anew(half, times):
    """Wait until its check was claimed again this many times."""
    seen = set()
    wait_until(lambda: seen.add(row_of(half).available_at) or len(seen) > times)


OFTEN = {"EVERY": 0.4}


def test_checker_that_hangs_for_one_message_is_reported_with_its_stack_and_holds_up_no_other_message(relay, begun):
    hanging = prepare(CHECKED_IN_VAIN, {}, biz_id="hanging")
    with relay(CHECKS=OFTEN, SHUTDOWN_GRACE=A_LONG_TIME) as process:
        process.until(lambda: ", in asks_a_service_that_never_answers" in process.said())
        others = [prepare(topic, {"is_answered": True}) for topic in (CHECKED, CHECKED_IN_VAIN, CHECKED_IN_VAIN)]
        process.until(lambda: {state_of(half) for half in others} == {State.PUBLISHED})
        wait_until_claimed_anew(hanging, 4)

        assert state_of(hanging) == State.PREPARED
        assert begun() == {"hanging": 1}, "it was asked about again while it hangs"
        report = f"the checker of message {hanging.id} ({CHECKED_IN_VAIN}, biz-id hanging) has been running"
        assert process.said().count(report) == 1, process.said()
        assert "has not returned" in row_of(hanging).last_error
        assert process.end() == 0


@pytest.mark.parametrize(("threads", "taken"), [(1, 1), (2, 1), (4, 3)])
def test_checker_that_hangs_for_every_message_leaves_a_thread_to_other_topics(relay, begun, threads, taken):
    in_vain = [prepare(CHECKED_IN_VAIN, {}, biz_id=f"in vain {n}") for n in range(6)]
    with relay(CHECKS=OFTEN, CONCURRENCY=threads, SHUTDOWN_GRACE=A_LONG_TIME) as process:
        process.until(lambda: process.said().count("has been running") == taken)
        other = prepare(CHECKED, {})
        process.until(lambda: state_of(other) == State.PUBLISHED)

        assert {state_of(half) for half in in_vain} == {State.PREPARED}
        assert begun().total() == taken
        assert process.end() == 0


def test_message_whose_checker_hangs_is_checked_by_no_other_relay(relay, begun):
    first = prepare(CHECKED_IN_VAIN, {}, biz_id="first")
    with relay(CHECKS={"EVERY": 4}) as process:
        process.until(lambda: begun()["first"])
        with relay("another", CHECKS={"EVERY": 4}) as another:
            other = prepare(CHECKED, {})
            another.until(lambda: state_of(other) == State.PUBLISHED)
            wait_until_claimed_anew(first, 5)

            assert begun() == {"first": 1}


def test_hanging_callback_is_reported_with_its_stack_and_holds_up_no_other_callback(relay, begun, settings):
    with relay(CALLBACK_TIMEOUT=0.5, CONCURRENCY=2, SHUTDOWN_GRACE=A_LONG_TIME) as process:
        for n in range(5):
            published(HANGING, biz_id=f"hanging {n}")
        process.until(begun)
        published(QUICK, biz_id="quick")

        process.until(lambda: [name for name, _ in effects()] == ["quick"])
        process.until(lambda: ", in calls_a_service_that_never_answers" in process.said())
        process.until(lambda: not sessions_of_the_relay("idle in transaction"))
        assert begun().total() == 1
        settings.OUTBOX = {"STUCK_AFTER": timedelta(seconds=1)}
        process.until(lambda: [name.split(".")[-1] for name in hanging("default")] == ["calls_a_service_that_never_answers"])
        assert process.end() == 0
    assert PendingCallback.objects.count() == 5


def test_database_ends_the_transaction_of_a_callback_that_takes_too_long_and_it_is_called_again(relay, gate, begun):
    with relay(CALLBACK_TIMEOUT=0.5, CONCURRENCY=1) as process:
        published(WAITING, biz_id="waiting")
        process.until(lambda: begun()["waiting"])
        process.until(lambda: not sessions_of_the_relay("idle in transaction"))
        process.until(lambda: "has not returned" in PendingCallback.objects.get().last_error)
        assert effects() == []

        gate.unlink()
        # A stall of half a second makes it the third call.
        process.until(lambda: [(name, call != "1") for name, call in effects()] == [("waiting", True)])
        assert "CALLBACK_TIMEOUT is 0.5 s" in process.said()
        assert not PendingCallback.objects.exists()


def test_database_outage_does_not_count_as_a_failed_attempt_of_a_callback(relay, gate, begun):
    with relay() as process:
        published(WAITING, biz_id="waiting")
        process.until(lambda: begun()["waiting"])
        # Its passes have short transactions as well.
        [pid] = wait_until(lambda: len(sessions := sessions_of_the_relay("idle in transaction")) == 1 and sessions)
        executed("SELECT pg_terminate_backend(%s)", [pid])
        gate.unlink()
        process.until(effects)

        assert effects() == [("waiting", "1")]
        assert begun() == {"waiting": 2}
        assert "a database became unavailable during the callback" in process.said()
        assert "failed and is called again" not in process.said()
        assert "Traceback" not in process.said()


@pytest.mark.parametrize("grace", [A_LONG_TIME, 1])
def test_sigterm_waits_for_a_callback_for_the_shutdown_grace_and_ends_the_relay_with_0(relay, gate, begun, grace):
    returns = grace == A_LONG_TIME
    with relay(SHUTDOWN_GRACE=grace) as process:
        published(WAITING, biz_id="waiting")
        process.until(lambda: begun()["waiting"])
        process.terminate()
        process.until(lambda: "relay: stopping" in process.said())
        if returns:
            gate.unlink()
        assert process.ends() == 0
        assert ("the process ends while the callback" in process.said()) != returns
    assert (effects(), PendingCallback.objects.count()) == (([("waiting", "1")], 0) if returns else ([], 1))
