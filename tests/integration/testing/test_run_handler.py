"""Handlers called directly, with messages made for them, in the transaction that the inbox gives them."""

from contextlib import suppress
from datetime import timedelta
from decimal import Decimal

import pytest
from django.db import DatabaseError, connection, transaction

from inbox import Reject, batch_handler, idempotent_handler, leased_handler
from inbox.errors import TransactionBroken, TransactionControl
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.testing import make_message, run_handler
from outbox import publish
from outbox.testing import assert_nothing_published, assert_published
from tests.support.apps.effects.models import Effect, Unique
from tests.support.sql import executed

TOPIC = "tests.run_handler"


@pytest.fixture
def handler():
    """Decorates a function as a handler of this test's topic."""
    names = []

    def decorate(function, *, by=idempotent_handler, **options):
        names.append(f"{TOPIC}.{len(names)}")
        return by(TOPIC, name=names[-1], **options)(function)

    yield decorate
    for name in names:
        registry.remove(name)


def a_message(payload=None, **attributes):
    return make_message(TOPIC, {} if payload is None else payload, **attributes)


def test_message_that_is_made_is_a_first_delivery_unless_it_is_a_later_attempt():
    first, later = a_message(), a_message(biz_id="order-1", attempt=3, headers={"tenant": "acme"})

    assert first.biz_id == first.correlation_id == first.id
    assert (first.attempt, first.redelivered, first.headers, first.key) == (1, False, {}, "")
    assert first.created_at is not None
    assert (later.biz_id, later.attempt, later.redelivered, later.headers) == ("order-1", 3, True, {"tenant": "acme"})


@pytest.mark.django_db
class TestRunHandler:
    def test_handler_may_publish_and_is_the_cause_of_that(self, handler):
        function = handler(lambda message: publish("tests.called", message.payload))
        message = a_message({"order": "1"})

        run_handler(function, message)
        assert not InboxMessage.objects.exists()

        said = assert_published("tests.called", payload__order="1")
        assert (said.causation_id, said.correlation_id) == (message.id, message.correlation_id)

    def test_failure_reaches_the_test_and_leaves_no_effect(self, handler):
        def refuse(message):
            Effect.objects.create(name="half")
            publish("tests.called", {})
            raise Reject("no such order")

        with pytest.raises(Reject, match="no such order"):
            run_handler(handler(refuse), a_message())

        assert not Effect.objects.exists()
        assert_nothing_published()

    def test_payload_is_enough_for_a_message(self, handler):
        function = handler(lambda message: (message.topic, message.payload, message.biz_id, message.attempt))

        assert run_handler(function, {"total": Decimal("9.90")}, biz_id="order-1", attempt=2) == (
            TOPIC,
            {"total": "9.90"},
            "order-1",
            2,
        )

    def test_wrong_call_is_refused_with_what_to_do(self, handler):
        function, message = handler(lambda message: None), a_message()
        calls = [
            (TypeError, r"biz_id: a Message has its own attributes\. Pass these to make_message", [message], {"biz_id": "1"}),
            (TypeError, "not JSON serializable", [{"when": object()}], {}),
            (ValueError, "not JSON compliant", [float("nan")], {}),
            (ValueError, "takes one message at a time, but 2 were given", [message, a_message()], {}),
            (ValueError, "needs at least one message", [], {}),
            (
                LookupError,
                r"run_handler', but the topic of the message is 'tests\.o",
                [make_message("tests.other", {})],
                {},
            ),
        ]

        for error, said, given, options in calls:
            with pytest.raises(error, match=said):
                run_handler(function, *given, **options)
        with pytest.raises(LookupError, match="is not a handler"):
            run_handler(lambda message: None, message)

    def test_function_of_two_topics_needs_a_message_that_says_which(self, handler):
        function = handler(lambda message: message.topic)
        idempotent_handler("tests.second", name="tests.second")(function)
        try:
            with pytest.raises(ValueError, match="pass make_message"):
                run_handler(function, {})
            assert run_handler(function, make_message("tests.second", {})) == "tests.second"
        finally:
            registry.remove("tests.second")

    def test_message_has_the_biz_id_that_the_handler_names(self, handler):
        handler(lambda message: message.biz_id, biz_id="order")

        assert run_handler(f"{TOPIC}.0", a_message({"order": 17})) == "17", "a handler may be given by its name"

    def test_batch_handler_gets_a_list(self, handler):
        function = handler(lambda messages: [message.payload for message in messages], by=batch_handler, size=10)

        assert run_handler(function, a_message(1), a_message(2)) == [1, 2]

    def test_async_handler_is_run_to_its_end(self, handler):
        async def ship(message):
            await Effect.objects.acreate(name=message.payload["name"])

        run_handler(handler(ship, timeout=timedelta(seconds=30)), a_message({"name": "a"}))

        assert Effect.objects.get().name == "a"

    def test_leased_handler_has_no_transaction_and_takes_its_steps_once(self, handler):
        taken = []

        def charge(message):
            assert not any(not getattr(block, "_from_testcase", False) for block in connection.atomic_blocks)
            for _ in range(2):
                charged = message.step("charge", lambda: taken.append(message.id) or {"total": Decimal(1)})
            return charged

        assert run_handler(handler(charge, by=leased_handler), a_message()) == {"total": "1"}
        assert len(taken) == 1

    def test_handler_that_ends_the_transaction_fails_as_in_production(self, handler):
        def commit(message):
            Effect.objects.create(name="half")
            executed("COMMIT")

        with pytest.raises(TransactionControl, match="remove the statement"):
            run_handler(handler(commit), a_message())

        assert not Effect.objects.exists()

    def test_it_may_be_called_inside_a_transaction(self, handler):
        with transaction.atomic():
            run_handler(handler(lambda message: publish("tests.called", {})), a_message())

        assert_published("tests.called")


@pytest.mark.every_database
@pytest.mark.django_db(transaction=True)
def test_swallowed_database_error_fails_as_in_production(handler):
    Unique.objects.create(name="taken")

    def swallow(message):
        Effect.objects.create(name="half")
        with suppress(DatabaseError):
            Unique.objects.create(name="taken")
        if connection.vendor == "sqlite":  # which goes on after an error, so it is marked as Django marks a failed block
            transaction.set_rollback(True)

    with pytest.raises(TransactionBroken, match="can no longer commit"):
        run_handler(handler(swallow), a_message())

    assert not Effect.objects.exists()
    assert not InboxMessage.objects.exists()
