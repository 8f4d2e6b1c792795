"""Handlers called directly, with messages made for them."""

from __future__ import annotations

from datetime import date, timedelta
from decimal import Decimal

import pytest
from django.db import connection, transaction

from inbox import Reject, batch_handler, idempotent_handler, leased_handler
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.testing import call_handler, make_message
from outbox import publish
from outbox.testing import assert_nothing_published, assert_published
from tests.support.apps.effects.models import Effect

TOPIC = "tests.call_handler"

pytestmark = pytest.mark.every_database


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


class TestMakeMessage:
    def test_payload_is_what_comes_out_of_json(self):
        message = a_message({"total": Decimal("9.90"), "day": date(2026, 1, 2), "pair": (1, 2)})

        assert message.payload == {"total": "9.90", "day": "2026-01-02", "pair": [1, 2]}

    def test_what_is_not_given_is_what_a_first_delivery_has(self):
        message = a_message()

        assert message.biz_id == message.correlation_id == message.id
        assert (message.attempt, message.redelivered, message.headers, message.key) == (1, False, {}, "")
        assert message.created_at is not None

    def test_later_attempt_is_redelivered(self):
        message = a_message(biz_id="order-1", attempt=3, headers={"tenant": "acme"})

        assert (message.biz_id, message.attempt, message.redelivered) == ("order-1", 3, True)
        assert message.headers == {"tenant": "acme"}


@pytest.mark.django_db
class TestCallHandler:
    def test_handler_may_publish_and_is_the_cause_of_that(self, handler):
        function = handler(lambda message: publish("tests.called", message.payload))
        message = a_message({"order": "1"})

        call_handler(function, message)

        said = assert_published("tests.called", payload__order="1")
        assert (said.causation_id, said.correlation_id) == (message.id, message.correlation_id)

    def test_failure_reaches_the_test_and_leaves_no_effect(self, handler):
        def refuse(message):
            Effect.objects.create(name="half")
            publish("tests.called", {})
            raise Reject("no such order")

        with pytest.raises(Reject, match="no such order"):
            call_handler(handler(refuse), a_message())

        assert not Effect.objects.exists()
        assert_nothing_published()

    def test_nothing_is_stored_so_the_same_message_may_come_again(self, handler):
        function = handler(lambda message: message.attempt)
        message = a_message(attempt=2)

        assert [call_handler(function, message), call_handler(function, message)] == [2, 2]
        assert not InboxMessage.objects.exists()

    def test_message_has_the_biz_id_that_the_handler_names(self, handler):
        function = handler(lambda message: message.biz_id, biz_id="order")

        assert call_handler(function, a_message({"order": 17})) == "17"

    def test_batch_handler_gets_a_list(self, handler):
        function = handler(lambda messages: [message.payload for message in messages], by=batch_handler, size=10)

        assert call_handler(function, a_message(1), a_message(2)) == [1, 2]

    def test_one_message_is_not_two(self, handler):
        with pytest.raises(ValueError, match="takes one message at a time, and 2 were given"):
            call_handler(handler(lambda message: None), a_message(), a_message())

    def test_async_handler_is_run_to_its_end(self, handler):
        async def ship(message):
            await Effect.objects.acreate(name=message.payload["name"])

        call_handler(handler(ship, timeout=timedelta(seconds=30)), a_message({"name": "a"}))

        assert Effect.objects.get().name == "a"

    def test_leased_handler_has_no_transaction_and_takes_its_steps_once(self, handler):
        taken = []

        def charge(message):
            assert not any(not getattr(block, "_from_testcase", False) for block in connection.atomic_blocks)
            for _ in range(2):
                charged = message.step("charge", lambda: taken.append(message.id) or {"total": Decimal(1)})
            return charged

        assert call_handler(handler(charge, by=leased_handler), a_message()) == {"total": "1"}
        assert len(taken) == 1

    def test_function_that_is_no_handler_of_the_topic_is_refused(self, handler):
        function = handler(lambda message: None)

        with pytest.raises(LookupError, match=r"takes 'tests\.call_handler', and the message is of the topic 'tests\.other'"):
            call_handler(function, make_message("tests.other", {}))
        with pytest.raises(LookupError, match="is no handler"):
            call_handler(lambda message: None, a_message())

    def test_it_may_be_called_inside_a_transaction(self, handler):
        with transaction.atomic():
            call_handler(handler(lambda message: publish("tests.called", {})), a_message())

        assert_published("tests.called")
