"""`local://`: the relay stores messages in the inbox of the same database, and the runner runs their handlers."""

from collections import Counter
from datetime import timedelta

import pytest
from django.core.management import call_command
from django.db import OperationalError, transaction
from django.test import override_settings

import inbox.local
from inbox import Retry
from inbox.models import InboxMessage
from inbox.receiving import reading
from inbox.receiving.admit import hand_over
from inbox.states import State
from inbox.store.message_rows import ConcurrentDuplicate
from outbox import publish
from outbox.models import OutboxMessage
from outbox.states import State as OutboxState
from tests.support.apps.effects.models import Effect
from tests.support.apps.worker import JOB
from tests.support.deliveries import TOPIC, effects, make_due, the_effect
from tests.support.relaying import connected, one_pass, published_many, relaying
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

SHORT = timedelta(milliseconds=200)


@pytest.fixture(autouse=True)
def local():
    with override_settings(OUTBOX={"BROKER_URL": "local://"}, INBOX={}):
        yield


@pytest.fixture
def relay_process(command):
    """`outbox_relay`, or another command, as a process whose handlers are those of tests.support.apps.worker."""

    def start(*arguments, name="outbox_relay", **inbox):
        inbox = {"BACKOFF": (SHORT, SHORT), **inbox}
        return command(name, *arguments, INBOX=inbox, OUTBOX={"BROKER_URL": "local://", "POLL_INTERVAL": SHORT})

    return start


def publish_committed(topic=TOPIC, payload=None, **arguments):
    with transaction.atomic():
        return publish(topic, {} if payload is None else payload, **arguments)


def relay_all():
    call_command("outbox_relay", drain=True)


def job(what, name="job"):
    publish_committed(JOB, {"do": what}, biz_id=name)


def state(name="job"):
    return InboxMessage.objects.filter(biz_id=name).values_list("state", flat=True).first()


@pytest.mark.every_database
class TestHandingOver:
    def test_a_message_takes_effect_once_in_every_handler_of_its_topic_as_it_was_published(self, handles):
        got = []
        for name in ("tests.a", "tests.b"):
            handles(got.append, name=name)
        handles(the_effect, name="tests.c", topic="something else")
        published = publish_committed(payload={"name": "Zoë"}, biz_id="b", key="k", headers={"tenant": "acme", "n": 1})

        relay_all()
        relay_all()

        assert OutboxMessage.objects.get().state == OutboxState.PUBLISHED
        rows = InboxMessage.objects.values_list("handler", "state", "attempts", "message_id", "biz_id")
        assert sorted(rows) == [(name, State.DONE, 1, str(published.id), "b") for name in ("tests.a", "tests.b")]
        message, _ = got
        assert (message.id, message.biz_id, message.key) == (str(published.id), "b", "k")
        assert (message.payload, message.headers) == ({"name": "Zoë"}, {"tenant": "acme", "n": 1})
        assert message.created_at == OutboxMessage.objects.get().created_at
        assert (message.attempt, message.redelivered) == (1, False)

    def test_message_for_a_handler_on_another_database_is_refused_with_the_remedy_and_holds_up_no_other(self, handles):
        handles(the_effect, using="other", topic="elsewhere")
        handles(the_effect)
        for number in range(3):
            publish_committed("elsewhere", biz_id=f"bad {number}")
            publish_committed(biz_id=f"good {number}")

        relay_all()

        assert sorted(Effect.objects.values_list("name", flat=True)) == ["good 0", "good 1", "good 2"]
        refused = OutboxMessage.objects.filter(topic="elsewhere")
        assert set(refused.values_list("state", "attempts")) == {(OutboxState.RETRYING, 1)}
        assert all("use a broker" in row.last_error for row in refused)

    def test_message_whose_biz_id_cannot_be_computed_becomes_a_dead_letter(self, handles):
        handles(the_effect, biz_id=lambda message: message.payload["order_id"])
        publish_committed()

        relay_all()

        assert OutboxMessage.objects.get().state == OutboxState.PUBLISHED
        assert InboxMessage.objects.get().state == State.DEAD

    def test_biz_id_that_fails_as_in_an_outage_or_hangs_holds_up_no_other_message_and_is_called_again(
        self, handles, monkeypatch
    ):
        monkeypatch.setattr(reading, "_LONGEST_READING", SHORT)
        calls = Counter()

        def identified(message):
            calls[message.biz_id] += 1
            if calls[message.biz_id] <= message.payload["fails"]:
                raise OperationalError("connection to server at 10.0.0.1 failed")
            while message.payload["hangs"] and calls[message.biz_id] == 1:
                pass
            return message.biz_id

        handles(the_effect, biz_id=identified, retry=Retry(max_attempts=2))
        handles(the_effect, topic="good")
        for number in range(20):
            publish_committed(payload={"fails": 2, "hangs": False}, biz_id=f"bad {number}")
        publish_committed(payload={"fails": 0, "hangs": True}, biz_id="slow")
        publish_committed("good", biz_id="good")

        with connected("local://") as transport:
            one_pass(transport)
        assert not calls, "a relay calls none"
        assert set(OutboxMessage.objects.values_list("state", flat=True)) == {OutboxState.PUBLISHED}

        relay_all()
        assert effects() == effects("good") == 1
        errors = InboxMessage.objects.filter(state=State.RETRYING, attempts=1).values_list("last_error", flat=True)
        assert len(errors) == 21
        assert any("took longer than its timeout of 0.2 s" in error for error in errors)

        make_due()
        relay_all()
        assert effects() == 22

    @pytest.mark.long
    def test_messages_whose_earlier_copies_are_running_hold_up_no_others(self, handles, monkeypatch):
        """More than fit into a batch: of a topic whose other messages can be handed over, and of one of which none can."""

        def hand_over_others(handler, *arrivals):
            if any(arrival.envelope.biz_id.startswith("running") for arrival in arrivals):
                raise ConcurrentDuplicate
            hand_over(handler, *arrivals)

        monkeypatch.setattr(inbox.local, "hand_over", hand_over_others)
        handles(the_effect, topic=[TOPIC, "shop.running"])
        published_many(600, biz_id=lambda number: f"other-{number}" if number % 20 == 19 else f"running-{number}")
        published_many(600, "shop.running", biz_id=lambda number: f"running-{number}")
        with relaying("local://"):
            wait_until(lambda: InboxMessage.objects.count() == 30)
            later = [publish_committed() for _ in range(20)]
            wait_until(lambda: InboxMessage.objects.count() == 30 + len(later))

        left = OutboxMessage.objects.exclude(state=OutboxState.PUBLISHED)
        assert set(left.values_list("attempts", flat=True)) == {0}
        assert set(left.filter(topic=TOPIC).values_list("state", flat=True)) == {OutboxState.READY}


class TestFailing:
    @pytest.mark.long
    def test_drain_relays_what_handlers_publish_during_the_drain(self, handles):
        def countdown(message):
            the_effect(message)
            if message.payload:
                publish(TOPIC, message.payload - 1)

        handles(countdown)
        publish_committed(payload=5)

        relay_all()

        assert effects() == 6
        assert set(OutboxMessage.objects.values_list("state", flat=True)) == {OutboxState.PUBLISHED}
        assert OutboxMessage.objects.values("correlation_id").distinct().count() == 1


class TestProcesses:
    @pytest.mark.every_database
    def test_a_message_that_kills_its_process_runs_out_of_attempts(self, relay_process):
        job("kill the process")
        with relay_process(MAX_ATTEMPTS=2, REDELIVERY_AFTER=SHORT) as process:
            deaths = process.restarted_until(lambda: state() == State.DEAD)
            job("work", "healthy")
            process.until(lambda: effects("healthy") == 1)

        row = InboxMessage.objects.get(biz_id="job")
        # After an attempt that never ended one more is granted.
        assert (deaths, set(process.exits)) == (3, {13})
        assert (row.attempts, effects("job")) == (3, 0)

    @pytest.mark.every_database
    def test_relay_and_consumer_processes_run_every_message_once(self, relay_process, tmp_path):
        with relay_process() as first, relay_process(name="inbox_consume") as second:
            first.until(lambda: "relay: sending the messages of" in first.said())
            second.until(lambda: "runner: running stored messages" in second.said())
            for number in range(20):
                job("work", f"job {number}")
            wait_until(lambda: InboxMessage.objects.filter(state=State.DONE).count() == 20)
            for process in (first, second):
                assert process.end() == 0

        assert effects() == Effect.objects.values("name").distinct().count() == 20
