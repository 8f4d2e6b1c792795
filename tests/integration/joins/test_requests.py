"""Requests and answers: handled once per request, in any order of arrival; what a timeout does; what a late answer becomes."""

import threading
from datetime import timedelta

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, transaction

from exactly_once.telemetry.tracing import OUTER_CORRELATION, Cause, caused_by
from inbox.contrib.joins import correlated, store
from inbox.contrib.joins.models import Run
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.operators.handler_pauses import pause, resume
from inbox.states import Outcome
from inbox.testing import make_message, run_handler, travel
from outbox import publish, request
from outbox.testing import published, run_relay
from tests.support.apps.effects.models import Effect
from tests.support.decisions import retry, skip
from tests.support.deliveries import InAThread, an_envelope, deliver, drain, run_to_the_end
from tests.support.joins import effects
from tests.support.waiting import A_WHILE

ASKED, ANSWERED = "bank.transfer.requested", "bank.transfer.answered"
NAME = "tests.transfer"
TIMEOUT = timedelta(minutes=10)

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def asks(own_handlers):
    """Register a function as the handler of the answers, for this test: `asks(function, on_timeout=…)`."""

    def register(function, **arguments):
        arguments = {"request": ASKED, "answer": ANSWERED, "timeout": TIMEOUT, "name": NAME, **arguments}
        return correlated(**arguments)(function)

    return register


def settle(asked, answered):
    Effect.objects.create(name=asked.payload["payment"], detail=answered.payload["result"])


def give_up(asked):
    Effect.objects.create(name=asked.payload["payment"], detail="no answer")


def is_asked(chain="chain-1", payment="payment-1", *, redelivered=False):
    envelope = an_envelope({"payment": payment}, topic=ASKED, correlation_id=chain)
    return deliver(registry.get(f"{NAME}/{ASKED}"), envelope, redelivered=redelivered)


def is_answered(chain="chain-1", result="paid", *, redelivered=False):
    envelope = an_envelope({"result": result}, topic=ANSWERED, correlation_id=chain)
    return deliver(registry.get(f"{NAME}/{ANSWERED}"), envelope, redelivered=redelivered)


def late_answer():
    return InboxMessage.objects.get(topic=ANSWERED)


class TestRequest:
    def test_request_begins_a_chain_of_its_own_and_names_its_cause_and_the_outer_chain(self):
        with transaction.atomic(), caused_by(Cause(message_id="cause-1", correlation_id="chain-0")):
            asked = request(ASKED, {}, biz_id="payment-1", headers={"tenant": "acme"})
            publish("other", {})
        with transaction.atomic():
            outside = request(ASKED, {})
        first, second, third = published()

        assert first.correlation_id == str(asked.id)
        assert (first.biz_id, first.causation_id) == ("payment-1", "cause-1")
        assert first.headers == {"tenant": "acme", OUTER_CORRELATION: "chain-0"}
        assert (second.correlation_id, second.headers) == ("chain-0", {})
        assert (third.correlation_id, third.headers) == (str(outside.id), {}), "outside of a handler there is no outer chain"


@pytest.mark.every_database
class TestAnswer:
    @pytest.mark.parametrize("order", [(is_asked, is_answered), (is_answered, is_asked)], ids=["request first", "answer first"])
    def test_answer_is_handled_once_with_its_request_in_either_order_and_with_duplicates(self, asks, order):
        asks(settle, on_timeout=give_up)
        for arrives in order:
            assert arrives() is Outcome.HANDLED
            assert arrives() is Outcome.DUPLICATE
        run_to_the_end()
        travel(TIMEOUT)
        drain()
        assert effects() == [("payment-1", "paid")]

    def test_answer_of_another_service_continues_the_chain_and_finds_its_request_through_the_relay(self, asks, handles):
        def at_the_bank(message):
            publish(ANSWERED, {"result": f"paid {message.payload['payment']}"})

        def settle_and_publish(asked, answered):
            settle(asked, answered)
            publish("order.paid", {})

        handles(at_the_bank, topic=ASKED)
        asks(settle_and_publish)
        with transaction.atomic(), caused_by(Cause(message_id="order-1", correlation_id="chain-0")):
            for number in range(3):
                request(ASKED, {"payment": number})
        run_relay()

        assert sorted(effects()) == [(str(number), f"paid {number}") for number in range(3)]
        # The chain in which the requests were made, not the one of each request.
        assert {message.correlation_id for message in published("order.paid")} == {"chain-0"}

    @pytest.mark.parametrize("is_timeout_async", [True, False])
    def test_async_handlers_of_answer_and_timeout_run_in_the_transaction_and_the_chain_of_the_run(self, asks, is_timeout_async):
        async def settle_async(asked, answered):
            await Effect.objects.acreate(name=asked.payload["payment"], detail=answered.payload["result"])
            await sync_to_async(publish)("order.paid", {})

        async def give_up_async(asked):
            await Effect.objects.acreate(name=asked.payload["payment"], detail="no answer")

        asks(settle_async, on_timeout=give_up_async if is_timeout_async else give_up)
        is_asked()
        is_answered()
        is_asked("chain-2", "payment-2")
        drain()
        travel(TIMEOUT)
        drain()
        assert effects() == [("payment-1", "paid"), ("payment-2", "no answer")]
        assert published("order.paid")[0].correlation_id == "chain-1"

    def test_run_handler_calls_the_functions_with_the_given_messages(self, asks):
        function = asks(settle, on_timeout=give_up)
        asked = make_message(ASKED, {"payment": "payment-1"}, correlation_id="chain-1")
        run_handler(function, asked, make_message(ANSWERED, {"result": "paid"}, correlation_id="chain-1"))
        run_handler(function, asked)
        assert effects() == [("payment-1", "paid"), ("payment-1", "no answer")]


@pytest.mark.every_database
class TestTimeout:
    def test_timeout_is_handled_once_although_no_answer_ever_comes(self, asks):
        asks(settle, on_timeout=give_up)
        is_asked()
        travel(TIMEOUT - timedelta(seconds=30))
        drain()
        assert effects() == []
        travel(timedelta(minutes=1))
        drain()
        run_to_the_end()
        assert effects() == [("payment-1", "no answer")]

    @pytest.mark.parametrize(("first", "second", "waits"), [(is_answered, is_asked, ASKED), (is_asked, is_answered, ANSWERED)])
    def test_message_that_arrived_in_time_and_is_handled_after_the_timeout_is_not_missing(self, asks, first, second, waits):
        asks(settle, on_timeout=give_up)
        pause(f"{NAME}/{waits}")
        first()
        assert second(redelivered=True) is Outcome.STORED
        travel(TIMEOUT)
        drain()
        assert (Run.objects.select_related("row").get().row.state, effects()) == ("retrying", [])

        resume(f"{NAME}/{waits}")
        run_to_the_end()
        assert effects() == [("payment-1", "paid")]

    def test_timeout_counts_from_the_arrival_of_a_request_that_is_handled_later(self, asks):
        asks(settle, on_timeout=give_up)
        pause(f"{NAME}/{ASKED}")
        is_asked(redelivered=True)
        travel(TIMEOUT - timedelta(minutes=1))
        resume(f"{NAME}/{ASKED}")
        drain()
        assert effects() == []
        travel(timedelta(minutes=1))
        drain()
        assert effects() == [("payment-1", "no answer")]

    def test_late_answer_is_a_dead_letter_that_says_so(self, asks):
        asks(settle, on_timeout=give_up)
        is_asked()
        travel(TIMEOUT)
        drain()

        assert is_answered() is Outcome.DEAD
        assert "came too late for the run chain-1: its run is done" in late_answer().last_error
        assert late_answer().body
        run_to_the_end()
        assert effects() == [("payment-1", "no answer")]

    def test_answer_while_the_timeout_is_handled_is_not_lost(self, asks):
        def gives_up_slowly(asked):
            give_up(asked)
            began.set()
            assert go.wait(A_WHILE)

        began, go = threading.Event(), threading.Event()
        asks(settle, on_timeout=gives_up_slowly)
        is_asked()
        travel(TIMEOUT)
        with InAThread(drain):
            assert began.wait(A_WHILE)
            if connection.vendor == "postgresql":
                assert is_answered() is Outcome.STORED
            go.set()
        if connection.vendor == "sqlite":
            is_answered()
        run_to_the_end()

        assert effects() == [("payment-1", "no answer")]
        assert late_answer().state == "dead"

    def test_answer_between_two_attempts_of_the_timeout_is_handled_instead(self, asks):
        def fails(asked):
            give_up(asked)
            raise RuntimeError("not yet")

        asks(settle, on_timeout=fails)
        is_asked()
        travel(TIMEOUT)
        drain()
        assert is_answered() is Outcome.HANDLED
        run_to_the_end()
        assert effects() == [("payment-1", "paid")]

    def test_without_on_timeout_the_request_is_a_dead_letter_that_a_late_answer_can_complete(self, asks):
        asks(settle)
        is_asked()
        travel(TIMEOUT)
        drain()
        run = Run.objects.select_related("row").get()
        assert run.row.state == "dead"
        assert ANSWERED in run.row.last_error

        assert is_answered() is Outcome.HANDLED
        run_to_the_end()
        assert effects() == []
        with transaction.atomic():
            retry("default", store.lock("default", NAME, "chain-1").row_id)
        drain()
        assert effects() == [("payment-1", "paid")]

    @pytest.mark.parametrize("on_timeout", [None, give_up])
    def test_answer_to_no_request_is_a_dead_letter_at_the_timeout(self, asks, on_timeout):
        asks(settle, on_timeout=on_timeout)
        assert is_answered("unknown") is Outcome.HANDLED
        travel(TIMEOUT)
        drain()
        row = Run.objects.select_related("row").get().row
        assert row.state == "dead"
        assert "unknown" in row.biz_id
        assert effects() == []

    def test_answer_of_a_request_that_an_operator_has_given_up_is_a_dead_letter(self, asks):
        asks(settle, on_timeout=give_up)
        is_asked()
        skip("default", Run.objects.get().row_id, "not needed")
        assert is_answered() is Outcome.DEAD
        assert "its run is skipped" in late_answer().last_error


class TestDeclaring:
    @pytest.mark.parametrize(
        ("arguments", "error", "words"),
        [
            ({"timeout": 600}, TypeError, "timedelta"),
            ({"timeout": timedelta()}, ValueError, "longer than zero"),
            ({"answer": ASKED}, ValueError, "each may be listed once"),
            ({"on_timeout": "give_up"}, TypeError, "must be a function of the request"),
        ],
    )
    def test_invalid_options_are_refused(self, asks, arguments, error, words):
        with pytest.raises(error, match=words):
            asks(settle, **arguments)
        assert registry.get(NAME) is None
