"""What code has published, found and asserted."""

import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from unittest.mock import ANY

import pytest
from django.db import transaction

from outbox import cancel, publish
from outbox.testing import assert_nothing_published, assert_published, published

pytestmark = pytest.mark.django_db

TOPIC = "shop.order.placed"


def place(order, **options):
    with transaction.atomic():
        return publish(TOPIC, {"order": order, "items": [{"sku": "pen"}]}, biz_id=f"order-{order}", **options)


def failure_of(assertion):
    with pytest.raises(AssertionError) as caught:
        assertion()
    return str(caught.value)


class TestPublished:
    def test_message_has_its_decoded_payload_and_all_that_was_given(self):
        at = datetime(2035, 1, 1, tzinfo=UTC)
        written = place("1", key="anna", headers={"tenant": "acme"}, deliver_at=at, expires_in=timedelta(hours=1))

        (message,) = published()

        assert message.id == str(written.id)
        assert (message.topic, message.biz_id, message.key) == (TOPIC, "order-1", "anna")
        assert message.payload == {"order": "1", "items": [{"sku": "pen"}]}
        assert message.headers == {"tenant": "acme"}
        assert (message.state, message.attempts, message.last_error) == ("scheduled", 0, "")
        assert (message.deliver_at, message.due_at, message.expires_at) == (at, at, at + timedelta(hours=1))
        assert (message.correlation_id, message.causation_id) == (message.id, "")

    def test_messages_come_in_the_order_of_publishing_in_each_state(self):
        for order in "213":
            message = place(order)
        with transaction.atomic():
            cancel(message.id)

        assert [message.payload["order"] for message in published()] == ["2", "1", "3"]
        assert assert_published(TOPIC, state="cancelled").payload["order"] == "3"

    def test_topic_and_values_select_messages(self):
        place("1", headers={"tenant": "acme"})
        place("2")
        with transaction.atomic():
            publish("shop.order.paid", {"order": "1"})

        def orders(*topic, **expected):
            return [message.payload["order"] for message in published(*topic, **expected)]

        assert orders() == ["1", "2", "1"]
        assert orders(TOPIC) == ["1", "2"]
        assert orders(payload__order="1") == ["1", "1"]
        assert orders(TOPIC, payload__items__0__sku="pen", headers__tenant="acme") == ["1"]
        assert orders(payload__items__1__sku="pen") == []
        assert orders(payload__items__sku="pen") == []
        assert orders(payload__order__number="1") == []
        assert orders(payload={"order": "1"}) == ["1"]

    def test_payload_values_are_compared_as_json_has_them(self):
        order = uuid.uuid4()
        with transaction.atomic():
            publish(TOPIC, {"order": order, "total": Decimal("9.90")})

        assert_published(TOPIC, payload__order=order, payload__total=Decimal("9.90"))
        assert_published(TOPIC, payload={"order": str(order), "total": ANY})
        assert_nothing_published(TOPIC, payload__total=9.9)

    @pytest.mark.django_db(databases=["default", "other"])
    def test_each_database_has_its_own_messages(self):
        with transaction.atomic(using="other"):
            publish(TOPIC, {}, using="other")

        assert_nothing_published()
        assert_published(TOPIC, using="other")


class TestAssertPublished:
    def test_two_messages_are_not_one_and_none_are_none(self):
        assert failure_of(lambda: assert_published(TOPIC)).endswith("1 expected.\nThe outbox is empty.")
        place("1")
        place("2")

        assert assert_published(TOPIC, payload__order="1", biz_id="order-1", count=1).payload["order"] == "1"
        assert_nothing_published("shop.order.paid")
        assert_nothing_published(TOPIC, payload__order="3")
        assert_published(TOPIC, count=2)
        said = failure_of(lambda: assert_published(TOPIC))
        assert said.startswith("2 messages were published on the topic 'shop.order.placed' on 'default', 1 expected.\n")

    def test_failure_shows_what_was_published_instead_and_what_differs(self):
        place("1", headers={"tenant": "acme"})
        with transaction.atomic():
            publish("shop.order.paid", {"order": "1"})

        said = failure_of(lambda: assert_published(TOPIC, payload__order="2", payload__sku="pen", headers__tenant="acme"))

        assert said == (
            "No message was published on the topic 'shop.order.placed' with payload__order='2', payload__sku='pen', "
            "headers__tenant='acme' on 'default', 1 expected.\n"
            "In the outbox:\n"
            "  shop.order.placed ready biz_id='order-1' headers={'tenant': 'acme'} "
            "payload={'order': '1', 'items': [{'sku': 'pen'}]}\n"
            "      payload__order: '1', expected '2'\n"
            "      payload__sku: missing, expected 'pen'\n"
            "  shop.order.paid ready payload={'order': '1'}"
        )

    def test_failure_is_not_longer_than_can_be_read(self):
        for order in range(30):
            place(str(order))
        with transaction.atomic():
            publish("shop.report", {"text": "x" * 5000})

        said = failure_of(lambda: assert_published("shop.order.paid"))

        assert len(said) < 5000
        assert said.endswith("… and 11 more")

    def test_unknown_name_and_a_count_of_none_are_refused(self):
        with pytest.raises(TypeError, match=r"a message has no 'payloads'\. Did you mean 'payload'\?"):
            published(payloads__order="1")
        with pytest.raises(ValueError, match="use assert_nothing_published"):
            assert_published(TOPIC, count=0)


def test_nothing_is_published_by_a_rolled_back_transaction_and_a_failure_shows_what_was():
    with transaction.atomic():
        publish(TOPIC, {})
        transaction.set_rollback(True)
    assert_nothing_published()
    place("1")

    said = failure_of(assert_nothing_published)

    assert said.startswith("1 message was published on 'default', none expected.\nIn the outbox:\n  shop.order.placed ready")
