"""Lease mode in real consumers that are killed and frozen."""

from __future__ import annotations

from datetime import timedelta

import pytest

from inbox.handlers import Handler
from inbox.models import InboxMessage, State
from tests.app.models import Effect, Unique
from tests.deliveries import effects, the_row, wait_until
from tests.leased import LEASED_JOB
from tests.workers import Process, as_environment, broker_options, declare, length_of, send

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

OF_THE_LEASED = Handler(name="testleased.work", topic=LEASED_JOB, function=print, biz_id=None, using="default", mode="lease")
SHORT = timedelta(milliseconds=200)
SETTLEMENT = ("state", "attempts", "fence", "settled_at", "last_error")


@pytest.fixture(params=["database", "redis"])
def lease_store(request):
    return "database" if request.param == "database" else request.getfixturevalue("redis_url")


@pytest.fixture
def consumer(process_environment, rabbitmq_url, tmp_path, lease_store):
    """Start `inbox_consume`: `with consumer("a") as process`."""

    def start(name):
        given = {"REDELIVERY_AFTER": SHORT, "RETRY_BASE": SHORT, "RETRY_CAP": SHORT, "MAX_ATTEMPTS": 3, "GROUP": "tests"}
        environment = {
            **process_environment,
            **as_environment(
                INBOX={"BROKER_URL": rabbitmq_url, "EXCHANGE": "outbox", "LEASE_STORE": lease_store, **given},
                OUTBOX={"BROKER_URL": rabbitmq_url},
            ),
            "DJANGO_SETTINGS_MODULE": "tests.leased.settings",
        }
        declare(OF_THE_LEASED, broker_options(rabbitmq_url))
        return Process(environment, tmp_path / f"{name}.log", "inbox_consume")

    return start


@pytest.fixture
def job(rabbitmq_url):
    return lambda what, **payload: send(rabbitmq_url, LEASED_JOB, {"do": what, **payload}, message_id="job")


@pytest.fixture
def is_settled(rabbitmq_server, rabbitmq_url):
    """Neither the broker nor the inbox has anything left to do."""

    def ask():
        left = length_of(rabbitmq_server, OF_THE_LEASED, broker_options(rabbitmq_url))
        return left == 0 and not InboxMessage.objects.exclude(state__in=[State.DONE, State.DEAD]).exists()

    return ask


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
        sleeper.freeze()
        with consumer("successor") as successor:
            # The broker still waits for the sleeper's answer, so this is a duplicate that finds it running.
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
