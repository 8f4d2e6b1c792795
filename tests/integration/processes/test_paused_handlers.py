"""A paused handler is not run: its messages stay at the broker or stored, in order, and nothing is lost."""

import json
import logging
from datetime import timedelta

import pytest
from django.core.management import CommandError
from django.db import transaction
from django.urls import reverse

from exactly_once.models import AuditEntry, Process
from exactly_once.wire.envelope import ORDERING_KEY_HEADER
from inbox import HandlerState, Ordered, pause, resume
from inbox.errors import UnknownHandler
from inbox.models import InboxMessage, PausedHandler
from inbox.operators import handler_pauses
from inbox.states import State
from tests.support.admin_pages import Page, superuser_client
from tests.support.apps.effects.models import Effect
from tests.support.apps.worker import JOB, NAMED
from tests.support.commands import output_of
from tests.support.deliveries import deliver, drain, effects, make_due, the_effect, the_row
from tests.support.inbox_rows import rename_messages
from tests.support.waiting import wait_until
from tests.support.workers import OF_THE_WORKERS, broker_options, consuming, declare, length_of, send

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

WORK = "worker.work"


def fails_once(message):
    the_effect(message)
    if message.attempt == 1:
        raise ValueError("not yet")


@pytest.mark.every_database
class TestStored:
    @pytest.mark.parametrize("rate", [None, "100/s"])
    def test_due_message_of_a_paused_handler_is_not_run_until_it_is_resumed(self, handles, rate):
        paused, other = handles(fails_once, name="tests.paused", rate_limit=rate), handles(fails_once, name="tests.other")
        deliver(paused)
        deliver(other)
        pause("tests.paused", reason="defect", by="ada")
        make_due()

        assert drain() == 1
        assert dict(InboxMessage.objects.values_list("handler", "attempts")) == {"tests.paused": 1, "tests.other": 2}

        assert resume("tests.paused") is HandlerState.PAUSED
        assert drain() == 1
        assert (the_row(handler="tests.paused").state, effects()) == (State.DONE, 2)

    def test_pause_that_is_rolled_back_pauses_nothing(self, handles):
        deliver(handles(fails_once, name="tests.paused"))
        make_due()
        with transaction.atomic():
            pause("tests.paused")
            transaction.set_rollback(True)

        assert drain() == 1


class TestFunctions:
    def test_pausing_twice_keeps_the_time_and_takes_the_new_reason(self, handles):
        handles(the_effect, name="tests.h")
        assert pause("tests.h", reason="one", by="ada") is HandlerState.ACTIVE
        first = PausedHandler.objects.get()

        assert pause("tests.h", reason="two", by="bob") is HandlerState.PAUSED

        second = PausedHandler.objects.get()
        assert (second.reason, second.paused_by, second.paused_at) == ("two", "bob", first.paused_at)
        assert [resume("tests.h"), resume("tests.h")] == [HandlerState.PAUSED, HandlerState.ACTIVE]

    def test_handler_is_paused_in_its_own_database_also_a_removed_one_with_stored_messages(self, handles):
        handles(the_effect, name="tests.there", using="other")
        pause("tests.there")
        assert PausedHandler.objects.using("other").get().handler == "tests.there"
        assert not PausedHandler.objects.exists()

        deliver(handles(fails_once, name="tests.h"))
        rename_messages(handler="tests.removed")
        assert pause("tests.removed") is HandlerState.ACTIVE
        for missing in ("tests.missing", "tests\0", "\ud800", None):
            with pytest.raises(UnknownHandler, match="No handler is called "):
                pause(missing)

    def test_handler_is_not_paused_in_a_database_where_no_consumer_would_read_it(self, handles):
        """The command works on the default database, unless another one is named."""
        handles(the_effect, name="tests.there", using="other")
        words = "tests.there works on the database 'other', not on 'default'.*--database other"

        for command in ("inbox_pause", "inbox_resume"):
            with pytest.raises(CommandError, match=words):
                output_of(command, "tests.there")
        page = reverse("admin:inbox_pausedhandler_add")
        refused = Page(superuser_client().post(page, {"handler": "tests.there"})).text
        assert "works on the database 'other'" in refused
        assert not PausedHandler.objects.exists()

        assert output_of("inbox_pause", "tests.there", database="other") == "Handler tests.there is paused."
        assert output_of("inbox_resume", "tests.there", database="other") == "Handler tests.there is resumed."


class TestConsuming:
    def test_paused_handler_leaves_its_messages_at_the_broker_and_others_are_handled(
        self, a_process, waiting, running, consumer_rows, rabbitmq_url
    ):
        """Also if the consumer is killed, and by one that starts meanwhile."""
        with a_process("inbox_consume") as killed:
            killed.until(lambda: consumer_rows.only and "receiving from 3 queues" in killed.said())
            _pause(WORK)
            killed.until(lambda: f"handler {WORK}: paused. Its queue keeps the messages" in killed.said())
            for number in range(5):
                send(rabbitmq_url, JOB, {}, message_id=f"m-{number}")
            send(rabbitmq_url, NAMED, {"name": "other"}, message_id="n-1")
            killed.until(lambda: Effect.objects.filter(name="other").exists())
            assert waiting(OF_THE_WORKERS) == 5
            killed.kill()
            killed.ends()
        Process.objects.all().delete()

        consumer = running(a_process("inbox_consume", log="again"))
        consumer.until(lambda: consumer_rows.only and "receiving from 2 queues" in consumer.said())
        consumer_rows.goes_on(consumer)
        assert waiting(OF_THE_WORKERS) == 5
        assert Effect.objects.count() == 1
        assert consumer_rows.only.facts["handlers"] == ["worker.chained", "worker.named", WORK]

        resume(WORK)
        consumer.until(lambda: Effect.objects.count() == 6)

    def test_ordered_handler_keeps_its_order_across_a_pause(self, handles, rabbitmq_server, rabbitmq_url, caplog):
        seen = []
        handler = handles(lambda message: seen.append(message.payload["n"]), name="tests.ordered", ordered=Ordered())
        caplog.set_level(logging.INFO, "inbox")
        given = broker_options(rabbitmq_url, POLL_INTERVAL=timedelta(milliseconds=50))
        declare(handler, given)
        with consuming([handler], given):
            send(rabbitmq_url, handler.topics[0], {"n": 0}, message_id="m-0", headers={ORDERING_KEY_HEADER: "k"})
            wait_until(lambda: seen == [0])
            pause("tests.ordered")
            wait_until(lambda: "handler tests.ordered: paused. Its queue keeps the messages" in caplog.text)
            for n in range(1, 30):
                send(rabbitmq_url, handler.topics[0], {"n": n}, message_id=f"m-{n}", headers={ORDERING_KEY_HEADER: "k"})
            wait_until(lambda: length_of(rabbitmq_server, handler, given) == 29)
            assert seen == [0]
            resume("tests.ordered")
            wait_until(lambda: len(seen) == 30)

        assert seen == list(range(30))


def _pause(name):
    """As the project of the process would, whose handlers this process does not know."""
    with transaction.atomic():
        handler_pauses.store_pause("default", name, "ada", "defect")


class TestCommands:
    def test_pause_and_resume_are_shown_by_status_and_written_into_the_audit_log(self, handles):
        deliver(handles(fails_once, name="tests.h"))
        with pytest.raises(CommandError, match="is not paused"):
            output_of("inbox_resume", "tests.h")
        for command in ("inbox_pause", "inbox_resume"):
            with pytest.raises(CommandError, match="No handler is called"):
                output_of(command, "tests.missing")

        assert output_of("inbox_pause", "tests.h", reason="defect") == "Handler tests.h is paused."
        assert "It was paused already" in output_of("inbox_pause", "tests.h", reason="another")
        [shown] = json.loads(output_of("exactly_once_status", json=True))["inbox"]["paused_handlers"]
        assert (shown["handler"], shown["messages"], shown["reason"]) == ("tests.h", 1, "another")
        assert "another" in output_of("exactly_once_status")
        assert output_of("inbox_resume", "tests.h") == "Handler tests.h is resumed."

        entries = AuditEntry.objects.order_by("id").values_list("action", "kind", "object_id", "place", "parameters")
        assert list(entries) == [
            ("pause", "handler", "tests.h", "inbox_pause", {"reason": "defect"}),
            ("pause", "handler", "tests.h", "inbox_pause", {"reason": "another"}),
            ("resume", "handler", "tests.h", "inbox_resume", {}),
        ]
