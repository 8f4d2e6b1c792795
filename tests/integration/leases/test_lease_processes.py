"""Lease mode in real consumers that are killed and frozen."""

import threading
from datetime import timedelta

import pytest
from django.core.management import call_command
from django.db import OperationalError, connection

from exactly_once.process.clock import monotonic, utcnow
from inbox import Lease
from inbox.models import InboxMessage
from inbox.states import Outcome, State
from inbox.transactions.running import DatabaseUnavailable
from tests.support.aliases import the_default_at
from tests.support.apps.effects.models import Effect, Unique
from tests.support.apps.leased import LEASED_JOB
from tests.support.deliveries import (
    A_WHILE,
    InAThread,
    an_envelope,
    deliver,
    drain,
    effects,
    handed_over,
    options,
    the_effect,
    the_row,
)
from tests.support.lost_answers import losing_the_answer
from tests.support.servers import FaultProxy
from tests.support.waiting import wait_until
from tests.support.workers import LEASED_OF_THE_WORKERS, broker_options, declare, length_of, send

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

SHORT = timedelta(milliseconds=200)
LEASE = timedelta(seconds=4.5)
"""Extended every third of it, so that a stall of two seconds costs none."""
SETTLEMENT = ("state", "attempts", "fence", "settled_at", "last_error")


@pytest.fixture(params=["database", "redis"])
def lease_store(request):
    return "database" if request.param == "database" else request.getfixturevalue("redis_url")


@pytest.fixture
def consumer(a_process, rabbitmq_url, lease_store):
    """Start `inbox_consume`: `with consumer("a") as process`."""

    def start(name, **options):
        given = {"BACKOFF": (SHORT, SHORT), "MAX_ATTEMPTS": 3, "LEASE_STORE": lease_store, **options}
        declare(LEASED_OF_THE_WORKERS, broker_options(rabbitmq_url))
        return a_process("inbox_consume", app="leased", log=name, **given)

    return start


@pytest.fixture
def job(rabbitmq_url):
    return lambda what, **payload: send(rabbitmq_url, LEASED_JOB, {"do": what, **payload}, message_id="job")


@pytest.fixture
def length(rabbitmq_server, rabbitmq_url):
    return lambda: length_of(rabbitmq_server, LEASED_OF_THE_WORKERS, broker_options(rabbitmq_url))


@pytest.fixture
def is_settled(length):
    """Neither the broker nor the inbox has anything left to do."""

    def ask():
        return length() == 0 and not InboxMessage.objects.exclude(state__in=[State.DONE, State.DEAD]).exists()

    return ask


@pytest.fixture
def short_consumer_timeout(consumer_timeout):
    """RabbitMQ closes the channel of a consumer that does not acknowledge a delivery within three seconds."""
    consumer_timeout(3000)


@pytest.mark.usefixtures("short_consumer_timeout")
class TestRunLongerThanTheConsumerTimeoutOfTheBroker:
    @pytest.fixture
    def is_acknowledged(self, lease_store, length):
        """Has the broker no copy of the message any more, while it is being run?"""
        if lease_store == "database":
            # Acknowledged before the handler was called.
            return lambda process: effects("begun job") and length() == 0
        # The channel is closed, and the message is redelivered and acknowledged, because its row is running.
        return lambda process: process.said().count("consumer: receiving from") == 2 and length() == 0

    def test_run_is_not_repeated(self, consumer, job, is_settled, is_acknowledged, lease_store):
        in_database = lease_store == "database"
        with consumer("a") as process:
            job("wait for the word")
            process.until(lambda: effects("begun job"))
            process.until(lambda: is_acknowledged(process))
            assert the_row().state == State.RUNNING, "the row keeps the message that the broker has no longer"
            assert effects("job") == 0
            Unique.objects.create(name="go job")
            process.until(lambda: effects("job") and is_settled())
            assert process.said().count("consumer: receiving from") == (1 if in_database else 2)
            assert process.end() == 0

        assert (effects("begun job"), effects("job")) == (1, 1)
        again = 0 if in_database else 1
        assert (the_row().state, the_row().duplicates, the_row().redeliveries) == (State.DONE, again, again)

    def test_message_of_a_killed_process_is_run_again(self, consumer, job, is_settled, is_acknowledged):
        with consumer("a") as process:
            job("wait for the word")
            process.until(lambda: is_acknowledged(process))
            process.kill()
            process.ends()
            process.start()
            process.until(lambda: effects("job") and is_settled())

        assert (effects("begun job"), effects("job")) == (2, 1)
        assert Effect.objects.get(name="job").detail == "2"


def test_message_of_a_killed_process_is_run_again_when_its_lease_has_ended(consumer, job, is_settled):
    with consumer("a") as process:
        job("die once")
        assert process.restarted_until(lambda: effects("job") and is_settled()) == 1

    assert Effect.objects.get(name="job").detail == "2", "the attempt that died was counted"
    assert effects("begun job") == 2


def test_message_that_always_kills_its_process_is_dead_after_max_attempts(consumer, job, is_settled):
    with consumer("a") as process:
        job("die")
        ended = process.restarted_until(lambda: InboxMessage.objects.filter(state=State.DEAD).exists() and is_settled())

    assert ended == effects("begun job") == 3
    assert "never ended" in the_row().last_error


class TestInterruptedRuns:
    """Three runs were interrupted. Each may have ended the process, so they begin again one after the other."""

    NAMES = ("first", "second", "third")

    @pytest.fixture
    def three_running(self, consumer, rabbitmq_url):
        def start(process):
            for name in self.NAMES:
                send(rabbitmq_url, LEASED_JOB, {"do": "wait for the word each time"}, message_id=name)
            process.until(lambda: self.have_begun(1))

        return start

    def have_begun(self, attempt):
        begun = Effect.objects.filter(name__startswith="begun ", detail=str(attempt))
        return {*begun.values_list("name", flat=True)} == {f"begun {name}" for name in self.NAMES}

    def end_them(self, process, is_settled):
        Unique.objects.bulk_create(Unique(name=f"go {name}") for name in self.NAMES)
        process.until(is_settled)
        assert {*InboxMessage.objects.values_list("state", "attempts")} == {(State.DONE, 2)}

    def test_run_that_hangs_delays_other_interrupted_messages_for_redelivery_after_only(
        self, consumer, three_running, is_settled
    ):
        with consumer("a", REDELIVERY_AFTER=SHORT) as process:
            three_running(process)
            process.kill()
            process.ends()
            process.start()
            process.until(lambda: self.have_begun(2))
            self.end_them(process, is_settled)

    def test_runs_that_a_stop_interrupted_begin_again_at_once(self, consumer, three_running, is_settled):
        hour = timedelta(hours=1)
        with consumer("a", REDELIVERY_AFTER=hour, SHUTDOWN_GRACE=SHORT) as process:
            three_running(process)
            assert process.end() == 70
            process.start()
            process.until(lambda: self.have_begun(2))
            self.end_them(process, is_settled)


def test_consumer_frozen_past_its_lease_settles_nothing(consumer, job, is_settled):
    with consumer("frozen") as frozen:
        job("wait for the word")
        frozen.until(lambda: effects("begun job"))
        with consumer("successor") as successor:
            successor.until(lambda: "consumer: receiving from" in successor.said())
            # Only now: with Redis the duplicates must arrive before the lease ends, or no row is stored.
            frozen.freeze()
            # The broker still waits for the frozen consumer to acknowledge, so these are duplicates, one for each consumer.
            for _ in range(2):
                job("wait for the word")
            successor.until(lambda: effects("job"))
            settled = wait_until(lambda: InboxMessage.objects.filter(state=State.DONE).values(*SETTLEMENT).first())
            Unique.objects.create(name="go job")
            frozen.thaw()
            frozen.until(lambda: "its outcome was not stored" in frozen.said())
            wait_until(is_settled)

    assert effects("job") == 2, "both have run; this is what a lease cannot prevent"
    assert InboxMessage.objects.values(*SETTLEMENT).get() == settled
    assert settled["attempts"] == 2


@pytest.mark.long
def test_database_that_does_not_answer_costs_no_lease_on_another_database(handles, lease_store):
    """Its server accepts connections and does not answer, so extending a lease there waits until it does."""
    begun, go_on = {"default": threading.Event(), "other": threading.Event()}, threading.Event()

    def handle(message):
        begun[message.biz_id].set()
        assert go_on.wait(A_WHILE)

    given = options(LEASE_STORE=lease_store)
    with FaultProxy("127.0.0.1", connection.settings_dict["PORT"]) as proxy, the_default_at(HOST="127.0.0.1", PORT=proxy.port):
        silent, other = (handles(handle, using=alias, lease=Lease(duration=LEASE)) for alias in begun)
        with InAThread(lambda: deliver(silent, an_envelope(biz_id="default"), given=given)):
            assert begun["default"].wait(A_WHILE)
            proxy.freeze()
            with InAThread(lambda: deliver(other, an_envelope(biz_id="other"), given=given)) as run:
                assert begun["other"].wait(A_WHILE)
                ends_at = monotonic() + LEASE.total_seconds() + 0.5
                wait_until(lambda: monotonic() > ends_at)
                go_on.set()
            proxy.thaw()

    assert run.answer is Outcome.HANDLED


@pytest.fixture
def migrated_default(mortal_postgres):
    """The default alias is a database on the server that the test kills."""
    name = mortal_postgres.create_database().rpartition("/")[2]
    with the_default_at(NAME=name, PORT=mortal_postgres.port):
        call_command("migrate", verbosity=0)
        yield


def test_unavailable_database_as_lease_store_starts_no_run_and_delays_the_settlement(
    handles, mortal_postgres, migrated_default, caplog
):
    def handle_and_kill_the_store(message):
        ran.append(message.attempt)
        mortal_postgres.kill()

    ran = []
    handler = handles(handle_and_kill_the_store, lease=Lease(duration=timedelta(minutes=10)))
    envelope = an_envelope()
    with InAThread(lambda: deliver(handler, envelope)) as first:
        wait_until(lambda: "cannot be stored now" in caplog.text)
        with pytest.raises(DatabaseUnavailable):
            deliver(handler, an_envelope())
        mortal_postgres.start()
    assert first.answer is Outcome.HANDLED
    assert deliver(handler, envelope) is Outcome.DUPLICATE
    assert ran == [1]


GIVEN_UP = "given up"


class TestOutageDuringSteps:
    @pytest.fixture
    def restarting(self, handles, mortal_postgres, migrated_default):
        """A handler whose steps each stop the database once; which attempts were run, and which steps have stopped it."""

        def register(lease, steps=3):
            def handle(message):
                ran.append(message.attempt)
                try:
                    for number in range(steps):
                        message.step(f"step {number}", lambda number=number: stop(number))
                except DatabaseUnavailable:
                    stopped.append(GIVEN_UP)
                    raise
                the_effect(message)

            def stop(number):
                if number not in stopped:
                    stopped.append(number)
                    mortal_postgres.kill()

            ran, stopped = [], []
            return handles(handle, lease=Lease(duration=lease)), ran, stopped

        return register

    def test_step_waits_for_its_database_and_no_attempt_is_counted(self, restarting, mortal_postgres, caplog):
        handler, ran, stopped = restarting(timedelta(minutes=10))
        with InAThread(lambda: deliver(handler, given=options(MAX_ATTEMPTS=1))) as run:
            for number in range(3):
                wait_until(lambda number=number: f"the step 'step {number}' cannot be stored now" in caplog.text)
                mortal_postgres.start()

        connection.close()
        assert (run.answer, ran, stopped, the_row().attempts) == (Outcome.HANDLED, [1], [0, 1, 2], 1)

    def test_run_goes_on_after_an_outage_longer_than_its_lease(self, handles, mortal_postgres, migrated_default, caplog):
        is_back, ran = threading.Event(), []

        def handle(message):
            ran.append(message.attempt)
            mortal_postgres.kill()
            assert is_back.wait(A_WHILE)
            wait_until(lambda: is_extended(message))
            connection.close()
            the_effect(message)

        def is_extended(message):
            try:
                return InboxMessage.objects.get(message_id=message.id).next_attempt_at > utcnow()
            except OperationalError:
                connection.close()
                return False

        handler = handles(handle, lease=Lease(duration=timedelta(seconds=1)))
        handed_over(handler)
        with InAThread(lambda: drain(options(MAX_ATTEMPTS=1))):
            wait_until(lambda: "its store is unavailable" in caplog.text)
            since = monotonic()
            wait_until(lambda: monotonic() > since + 1)
            mortal_postgres.start()
            is_back.set()

        connection.close()
        assert (the_row().state, the_row().attempts, ran) == (State.DONE, 1, [1])
        assert "its lease is lost" not in caplog.text

    def test_outage_longer_than_the_lease_counts_no_attempt_of_a_stored_message(self, restarting, mortal_postgres):
        handler, ran, stopped = restarting(timedelta(seconds=1), steps=1)
        handed_over(handler)
        with InAThread(lambda: drain(options(MAX_ATTEMPTS=1))):
            wait_until(lambda: GIVEN_UP in stopped)
            mortal_postgres.start()

        connection.close()
        assert (the_row().state, the_row().attempts, ran) == (State.DONE, 1, [1, 1])


def test_lost_answer_to_taking_a_lease_costs_neither_the_lease_nor_an_attempt(handles, process_environment):
    """The row is committed and the connection is lost before the answer; asked again, the store finds this owner's lease."""
    ran = []
    handler = handles(lambda message: ran.append(message.biz_id), lease=Lease(duration=timedelta(minutes=10)))
    answer = losing_the_answer(
        process_environment,
        before=lambda: deliver(handler, an_envelope(biz_id="first")),
        call=lambda: deliver(handler, an_envelope(biz_id="second")),
        written="SELECT 1 FROM inbox_inboxmessage WHERE state = 'running'",
    )

    assert answer is Outcome.HANDLED
    assert ran == ["first", "second"]
    row = the_row(biz_id="second")
    assert (row.state, row.attempts, row.fence, row.duplicates) == (State.DONE, 1, 1, 0)


def test_interrupted_unrepeatable_step_makes_a_dead_letter(consumer, job, is_settled):
    with consumer("a") as process:
        job("die in a step once", repeatable=False)
        process.restarted_until(lambda: InboxMessage.objects.filter(state=State.DEAD).exists() and is_settled())

    assert effects("charged job") == 1
    assert effects("job") == 0
    assert "'charge' was begun by an earlier attempt" in the_row().last_error


def test_interrupted_repeatable_step_is_taken_again(consumer, job, is_settled):
    with consumer("a") as process:
        job("die in a step once", repeatable=True)
        process.restarted_until(lambda: effects("job") and is_settled())

    assert effects("charged job") == 2
    assert effects("job") == 1


@pytest.mark.parametrize("lease_store", ["redis"], indirect=True)
def test_messages_are_run_once_when_redis_is_emptied_again_and_again_under_their_leases(
    consumer, rabbitmq_url, redis_server, length
):
    """One consumer outlives the loss of its leases, the other is killed over it; what was run or was being run is held back."""

    def allowed(names):
        Unique.objects.bulk_create(Unique(name=f"go {name}") for name in names)

    def a_round(handled, held):
        already = InboxMessage.objects.count()
        allowed(handled)
        copies = [sent_now(rabbitmq_url, name) for name in handled]
        survivor.until(lambda: all(effects(name) for name in handled) and length() == 0)
        # The broker deals them out in turn, so that each consumer has some in hand.
        copies += [sent_now(rabbitmq_url, name) for name in held]
        survivor.until(lambda: all(effects(f"begun {name}") for name in held))

        redis_server.flush()
        victim.kill()
        victim.ends()
        for copy in copies:
            copy()
        held_back = InboxMessage.objects.filter(quarantined=True, state=State.DEAD)
        survivor.until(lambda: held_back.count() == already + len(copies))
        allowed(held)
        survivor.until(lambda: length() == 0)

    names = [[f"{what}-{number}-{n}" for n in range(4)] for number in range(3) for what in ("handled", "held")]
    with consumer("survivor") as survivor, consumer("victim") as victim:
        for number in range(3):
            survivor.until(lambda consumers=number + 1: victim.said().count("consumer: receiving from") == consumers)
            a_round(*names[2 * number : 2 * number + 2])
            victim.start()
        allowed(["after"])
        sent_now(rabbitmq_url, "after")
        survivor.until(lambda: effects("after") and length() == 0)

    begun = Effect.objects.filter(name__startswith="begun ").values_list("name", flat=True)
    assert sorted(begun) == sorted(["begun after", *(f"begun {name}" for part in names for name in part)])
    # Nothing is left that would be run without a person's word.
    assert not InboxMessage.objects.exclude(state=State.DEAD, quarantined=True).exists()


def sent_now(url, name):
    """Send a message of this moment that waits for the word; call what is returned to send it again."""
    headers = {"cloudEvents:time": utcnow().isoformat()}

    def again():
        send(url, LEASED_JOB, {"do": "wait for the word"}, message_id=name, headers=headers)

    again()
    return again
