"""Deliveries on demand: the first one, duplicates, redeliveries, and what is stored and run later."""

from datetime import timedelta
from decimal import Decimal

import pytest
from django.db import transaction

from inbox import Lease, Reject
from inbox.testing import make_message
from inbox.testing.observing import HandlerFailed
from outbox import publish
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import fails, in_the_order_of_their_effects

pytestmark = pytest.mark.usefixtures("transaction_of_the_test")

TOPIC = "tests.deliver"


def a_message(name="a", **attributes):
    return make_message(attributes.pop("topic", TOPIC), {"name": name}, **attributes)


def the_effect(message):
    Effect.objects.create(name=message.payload["name"])


class TestDeliver:
    def test_every_handler_of_the_topic_gets_its_own_copy(self, handles, inbox_deliver, inbox_assert_handled):
        def change(message):
            message.payload["name"] += "!"
            the_effect(message)

        handles(change, topic=TOPIC)
        handles(change, topic=TOPIC)
        handles(the_effect, topic="tests.other")

        inbox_deliver(a_message())

        assert in_the_order_of_their_effects() == ["a!", "a!"]
        inbox_assert_handled(TOPIC, count=2, payload={"name": "a"})

    def test_message_arrives_as_it_was_made(self, handles, inbox_deliver):
        arrived = []
        handles(arrived.append, topic=TOPIC)
        message = make_message(
            TOPIC, {"total": Decimal("9.90"), "n": 10**20}, key="k", headers={"tenant": "acme"}, causation_id="c"
        )

        inbox_deliver(message)

        assert arrived == [message]

    def test_other_content_under_the_same_biz_id_is_a_conflict(self, handles, inbox_deliver, inbox_assert_duplicate):
        handles(the_effect, topic=TOPIC)
        inbox_deliver(a_message("a", biz_id="order-1"))
        inbox_deliver(a_message("b", biz_id="order-1"))

        assert inbox_assert_duplicate(TOPIC).conflicts == 1
        assert in_the_order_of_their_effects() == ["a"]

    @pytest.mark.parametrize("error", [ValueError, Reject])
    def test_error_of_the_handler_reaches_the_test_and_leaves_no_effect(self, handles, inbox_deliver, inbox_dead, error):
        def fail(message):
            the_effect(message)
            raise error("no")

        handles(fail, topic=TOPIC)

        with pytest.raises(error, match="no") as raised:
            inbox_deliver(a_message())

        assert raised.traceback[-1].name == "fail"
        assert in_the_order_of_their_effects() == []
        assert [letter.last_error for letter in inbox_dead(TOPIC)] == (["rejected: no"] if error is Reject else [])

    def test_error_of_one_handler_keeps_no_other_from_running(self, handles, inbox_deliver, inbox_assert_handled):
        handles(fails, topic=TOPIC)
        other = handles(the_effect, topic=TOPIC)

        inbox_deliver(a_message(), raise_errors=False)

        inbox_assert_handled(TOPIC, handler=other.name)
        assert in_the_order_of_their_effects() == ["a"]

    def test_handler_that_breaks_its_transaction_fails_although_it_raises_nothing(self, handles, inbox_deliver, inbox_dead):
        def end(message):
            transaction.set_rollback(True)

        handles(end, topic=TOPIC)

        with pytest.raises(HandlerFailed, match="TransactionBroken"):
            inbox_deliver(a_message())

    def test_message_that_is_too_old_is_refused(self, handles, inbox_deliver, inbox_dead):
        handles(the_effect, topic=TOPIC)
        message = a_message()

        with pytest.raises(HandlerFailed, match="past the deduplication window"):
            inbox_deliver(make_message(TOPIC, {}, created_at=message.created_at - timedelta(days=400)))

        assert len(inbox_dead()) == 1

    def test_load_is_given_to_a_batch_handler_together(self, handles, inbox_deliver, inbox_assert_handled):
        loads = []
        handles(lambda messages: loads.append([message.payload["name"] for message in messages]), topic=TOPIC, size=2)

        inbox_deliver(a_message("a"), a_message("b"), a_message("c"))

        assert loads == [["a", "b"], ["c"]]
        inbox_assert_handled(TOPIC, count=3)

    @pytest.mark.parametrize("options", [{"ordered": True}, {"group_commit": 5}, {"rate_limit": "1/h"}, {"lease": Lease()}])
    def test_handlers_of_each_kind_run(self, handles, inbox_deliver, options):
        handles(the_effect, topic=TOPIC, **options)

        inbox_deliver(*(a_message(name, key="k") for name in "abc"))

        assert in_the_order_of_their_effects() == ["a", "b", "c"]

    def test_what_cannot_be_delivered_is_refused(self, handles, inbox_deliver):
        handles(the_effect, topic=TOPIC)

        with pytest.raises(LookupError, match=r"No handler is registered for the topic 'tests\.unhandled'.*'tests\.deliver'"):
            inbox_deliver(make_message("tests.unhandled", {}))
        with pytest.raises(ValueError, match=r"attempt=3, but the inbox counts attempts\. Use run_handler"):
            inbox_deliver(a_message(attempt=3))
        for messages, options in (([a_message()], {"times": 0}), ([], {})):
            with pytest.raises(ValueError, match=r"deliver\(\) has nothing to deliver"):
                inbox_deliver(*messages, **options)

    def test_call_inside_atomic_is_refused(self, handles, inbox_deliver, inbox_drain):
        handles(the_effect, topic=TOPIC)

        with transaction.atomic():
            with pytest.raises(RuntimeError, match="call it after that block"):
                inbox_deliver(a_message())
            with pytest.raises(RuntimeError, match="call it after that block"):
                inbox_drain()


@pytest.mark.every_database
class TestRedeliver:
    def test_redelivery_of_a_handled_message_is_a_duplicate(
        self, handles, inbox_deliver, inbox_redeliver, inbox_assert_duplicate
    ):
        handles(the_effect, topic=TOPIC)
        message = a_message()
        inbox_deliver(message)

        inbox_redeliver(message)

        assert in_the_order_of_their_effects() == ["a"]
        assert inbox_assert_duplicate(TOPIC).redeliveries == 1

    def test_redelivery_of_an_unhandled_message_runs(self, handles, inbox_redeliver, inbox_assert_handled):
        handles(the_effect, topic=TOPIC, biz_id="name")

        inbox_redeliver(a_message())

        assert in_the_order_of_their_effects() == ["a"]
        inbox_assert_handled(TOPIC, attempts=1)


@pytest.mark.every_database
class TestDrain:
    def test_retry_runs_when_it_is_due_and_not_before(self, handles, inbox_deliver, inbox_drain, outbox_travel):
        attempts = []

        def fail_first(message):
            attempts.append(message.attempt)
            if message.attempt == 1:
                raise ValueError("no")

        handles(fail_first, topic=TOPIC)
        inbox_deliver(a_message(), raise_errors=False)
        assert inbox_drain() == 0

        outbox_travel(timedelta(minutes=1))

        assert inbox_drain() == 1
        assert attempts == [1, 2]

    def test_error_of_a_retry_reaches_the_test(self, handles, inbox_deliver, inbox_drain, outbox_travel, settings, inbox_dead):
        settings.INBOX = {"MAX_ATTEMPTS": 2}

        def fail(message):
            raise ValueError(f"attempt {message.attempt}")

        handles(fail, topic=TOPIC)
        inbox_deliver(a_message(), raise_errors=False)
        outbox_travel(timedelta(minutes=1))

        with pytest.raises(ValueError, match="attempt 2"):
            inbox_drain()

        assert len(inbox_dead(TOPIC, attempts=2)) == 1
        assert inbox_drain() == 0

    def test_what_handlers_publish_stays_in_the_outbox(self, handles, inbox_deliver, outbox_assert_published, outbox_run_relay):
        handles(lambda message: publish("tests.second", message.payload), topic=TOPIC)
        handles(the_effect, topic="tests.second")
        message = a_message()

        inbox_deliver(message)
        assert outbox_assert_published("tests.second", state="ready").causation_id == message.id
        assert in_the_order_of_their_effects() == []

        outbox_run_relay()
        assert in_the_order_of_their_effects() == ["a"]
