"""Lease mode in real consumers that are killed and frozen."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from django.db import connection

from inbox.handlers import Handler
from inbox.models import InboxMessage, State
from inbox.outcomes import Received
from outbox.kernel.clock import monotonic
from tests.support.aliases import the_default_at
from tests.support.apps.effects.models import Effect, Unique
from tests.support.apps.leased import LEASED_JOB
from tests.support.deliveries import A_WHILE, InAThread, an_envelope, deliver, effects, options, the_row, wait_until
from tests.support.lost_answers import losing_the_answer
from tests.support.servers import FaultProxy
from tests.support.workers import Process, as_environment, broker_options, declare, length_of, send

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

OF_THE_LEASED = Handler(name="testleased.work", topic=LEASED_JOB, function=print, biz_id=None, using="default", mode="lease")
SHORT = timedelta(milliseconds=200)
LEASE = timedelta(seconds=1.5)
SETTLEMENT = ("state", "attempts", "fence", "settled_at", "last_error")


@pytest.fixture(params=["database", "redis"])
def lease_store(request):
    return "database" if request.param == "database" else request.getfixturevalue("redis_url")


@pytest.fixture
def consumer(process_environment, rabbitmq_url, tmp_path, lease_store):
    """Start `inbox_consume`: `with consumer("a") as process`."""

    def start(name):
        given = {"RETRY_BASE": SHORT, "RETRY_CAP": SHORT, "MAX_ATTEMPTS": 3, "GROUP": "tests"}
        environment = {
            **process_environment,
            **as_environment(
                INBOX={"BROKER_URL": rabbitmq_url, "EXCHANGE": "outbox", "LEASE_STORE": lease_store, **given},
                OUTBOX={"BROKER_URL": rabbitmq_url},
            ),
            "DJANGO_SETTINGS_MODULE": "tests.support.apps.leased.settings",
        }
        declare(OF_THE_LEASED, broker_options(rabbitmq_url))
        return Process(environment, tmp_path / f"{name}.log", "inbox_consume")

    return start


@pytest.fixture
def job(rabbitmq_url):
    return lambda what, **payload: send(rabbitmq_url, LEASED_JOB, {"do": what, **payload}, message_id="job")


@pytest.fixture
def length(rabbitmq_server, rabbitmq_url):
    return lambda: length_of(rabbitmq_server, OF_THE_LEASED, broker_options(rabbitmq_url))


@pytest.fixture
def is_settled(length):
    """Neither the broker nor the inbox has anything left to do."""

    def ask():
        return length() == 0 and not InboxMessage.objects.exclude(state__in=[State.DONE, State.DEAD]).exists()

    return ask


@pytest.fixture
def impatient_broker(rabbitmq_server, rabbitmq_url):
    """It closes the channel of a consumer that leaves a delivery unanswered for three seconds."""
    given = {"consumer_timeout": "3000", "channel_tick_interval": "250"}
    # The broker must have started, and it lives longer than this test.
    before = {name: rabbitmq_server.evaluate(f"element(2, application:get_env(rabbit, {name})).") for name in given}

    def be(values):
        for name, value in values.items():
            rabbitmq_server.evaluate(f"application:set_env(rabbit, {name}, {value}).")

    be(given)
    yield
    be(before)


@pytest.mark.usefixtures("impatient_broker")
def test_a_run_that_outlasts_the_brokers_patience_is_run_once_and_its_copy_is_answered(consumer, job, is_settled, length):
    with consumer("a") as process:
        job("wait for the word")
        process.until(lambda: effects("begun job"))
        # The channel is closed, the message comes again, and is told that it is being run.
        process.until(lambda: process.said().count("Consuming") == 2)
        process.until(lambda: length() == 0)
        assert the_row().state == State.RUNNING, "the database has what the broker has not any more"
        assert effects("job") == 0
        Unique.objects.create(name="go job")
        process.until(lambda: effects("job") and is_settled())
        process.terminate()
        assert process.ends() == 0

    assert (effects("begun job"), effects("job")) == (1, 1)
    assert (the_row().state, the_row().duplicates, the_row().redeliveries) == (State.DONE, 1, 1)


@pytest.mark.usefixtures("impatient_broker")
def test_a_process_that_dies_after_that_has_its_message_run_by_another(consumer, job, is_settled, length):
    with consumer("a") as process:
        job("wait for the word")
        process.until(lambda: process.said().count("Consuming") == 2 and length() == 0)
        process.kill()
        process.ends()
        process.start()
        process.until(lambda: effects("job") and is_settled())

    assert (effects("begun job"), effects("job")) == (2, 1)
    assert Effect.objects.get(name="job").detail == "2"


def test_a_message_whose_process_is_killed_is_taken_over_when_its_lease_has_ended(consumer, job, is_settled):
    with consumer("a") as process:
        job("die once")
        assert process.restarted_until(lambda: effects("job") and is_settled()) == 1

    assert Effect.objects.get(name="job").detail == "2", "the attempt that died was counted"
    assert effects("begun job") == 2


def test_a_message_that_kills_its_process_each_time_runs_out_of_attempts(consumer, job, is_settled):
    with consumer("a") as process:
        job("die")
        ended = process.restarted_until(lambda: InboxMessage.objects.filter(state=State.DEAD).exists() and is_settled())

    assert ended == effects("begun job") == 3
    assert "never ended" in the_row().last_error


def test_an_owner_that_was_frozen_past_its_lease_settles_nothing(consumer, job, is_settled):
    with consumer("sleeper") as sleeper:
        job("wait for the word")
        sleeper.until(lambda: effects("begun job"))
        with consumer("successor") as successor:
            successor.until(lambda: "Consuming" in successor.said())
            # Only now: with Redis the duplicates must arrive before the lease ends, or no row is stored.
            sleeper.freeze()
            # The broker still waits for the sleeper's answer, so these are duplicates. It deals them out in turn: one to each.
            for _ in range(2):
                job("wait for the word")
            successor.until(lambda: effects("job"))
            settled = wait_until(lambda: InboxMessage.objects.filter(state=State.DONE).values(*SETTLEMENT).first())
            Unique.objects.create(name="go job")
            sleeper.thaw()
            sleeper.until(lambda: "nothing was settled" in sleeper.said())
            wait_until(is_settled)

    assert effects("job") == 2, "both have run; this is what a lease cannot prevent"
    assert InboxMessage.objects.values(*SETTLEMENT).get() == settled
    assert settled["attempts"] == 2


def test_a_database_that_does_not_answer_costs_no_lease_on_another(handles, lease_store):
    """Its server accepts connections and is silent, so whoever extends a lease there waits for as long as that lasts."""
    begun, go_on = {"default": threading.Event(), "other": threading.Event()}, threading.Event()

    def handle(message):
        begun[message.biz_id].set()
        assert go_on.wait(A_WHILE)

    given = options(LEASE_STORE=lease_store)
    with FaultProxy("127.0.0.1", connection.settings_dict["PORT"]) as proxy, the_default_at(HOST="127.0.0.1", PORT=proxy.port):
        silent, other = (handles(handle, using=alias, mode="lease", lease=LEASE) for alias in begun)
        with InAThread(lambda: deliver(silent, an_envelope(biz_id="default"), given=given)):
            assert begun["default"].wait(A_WHILE)
            proxy.freeze()
            with InAThread(lambda: deliver(other, an_envelope(biz_id="other"), given=given)) as run:
                assert begun["other"].wait(A_WHILE)
                ends_at = monotonic() + 3 * LEASE.total_seconds()
                wait_until(lambda: monotonic() > ends_at)
                go_on.set()
            proxy.thaw()

    assert run.answer is Received.HANDLED


def test_an_answer_to_taking_a_lease_that_is_lost_costs_neither_the_lease_nor_an_attempt(handles, process_environment):
    """The row is committed, and whoever wrote it hears nothing of that; asking again, it finds its own lease."""
    ran = []
    handler = handles(lambda message: ran.append(message.biz_id), mode="lease", lease=timedelta(minutes=10))
    answer = losing_the_answer(
        process_environment,
        before=lambda: deliver(handler, an_envelope(biz_id="first")),
        call=lambda: deliver(handler, an_envelope(biz_id="second")),
        written="SELECT 1 FROM inbox_inboxmessage WHERE state = 'running'",
    )

    assert answer is Received.HANDLED
    assert ran == ["first", "second"]
    row = the_row(biz_id="second")
    assert (row.state, row.attempts, row.fence, row.duplicates) == (State.DONE, 1, 1, 0)


def test_a_step_that_must_not_be_repeated_and_was_interrupted_stops_the_message_for_a_person(consumer, job, is_settled):
    with consumer("a") as process:
        job("die in a step once", repeatable=False)
        process.restarted_until(lambda: InboxMessage.objects.filter(state=State.DEAD).exists() and is_settled())

    assert effects("charged job") == 1
    assert effects("job") == 0
    assert "'charge' was begun by an earlier attempt" in the_row().last_error


def test_a_step_that_may_be_repeated_is(consumer, job, is_settled):
    with consumer("a") as process:
        job("die in a step once", repeatable=True)
        process.restarted_until(lambda: effects("job") and is_settled())

    assert effects("charged job") == 2
    assert effects("job") == 1
