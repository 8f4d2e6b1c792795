"""The webhook that the payment provider calls, and the handler of its events. Run by test_webhook.py under the settings of the
shop. What the view itself does is tested in `integration/webhooks/test_incoming_webhooks.py`."""

import json
from datetime import timedelta
from decimal import Decimal

import pytest

from demo_shop.payments.models import Alert, Payment, State
from demo_shop.payments.services import request_payment, sign
from outbox.testing import published, run_relay, travel

pytestmark = [pytest.mark.django_db, pytest.mark.every_database]


@pytest.fixture
def payment():
    return request_payment("order-1", Decimal("9.90"))


@pytest.fixture
def call(client):
    def call(body, signature=None):
        return client.post(
            "/payments/webhook/",
            body,
            content_type="application/json",
            headers={"X-Signature": sign(body) if signature is None else signature},
        )

    return call


def an_event(payment, *, event_id="evt-1", amount="9.90"):
    return json.dumps({"id": event_id, "payment": payment.pk, "amount": amount}).encode()


def received():
    """The messages about payments that were received: biz-id, payload."""
    return [(message.biz_id, message.payload) for message in published("payment.received")]


def relay():
    """The other apps of the shop do not know this order, and their handlers fail."""
    run_relay(raise_errors=False)


RECEIVED = ("payment-order-1", {"order": "order-1", "amount": "9.90"})


def test_a_signed_event_is_stored_and_its_handler_informs_the_shop(call, payment):
    response = call(an_event(payment))

    assert response.status_code == 200
    [event] = published("payment.notified")
    assert (event.biz_id, event.payload) == ("evt-1", json.loads(an_event(payment)))
    relay()
    assert received() == [RECEIVED]
    assert Payment.objects.get().state == State.RECEIVED


def test_a_second_event_for_the_same_payment_is_published_with_the_same_biz_id(call, payment):
    """The webhook cannot know that it is the same fact; the inbox of every consumer deduplicates it."""
    call(an_event(payment))
    call(an_event(payment, event_id="evt-2"))

    relay()

    assert received() == [RECEIVED, RECEIVED]


def test_an_event_with_another_amount_than_requested_raises_an_alert(call, payment):
    assert call(an_event(payment, amount="0.01")).status_code == 200

    relay()

    assert Alert.objects.get().reason == "evt-1 says 0.01 was paid, and we asked for 9.90"
    assert received() == []
    assert Payment.objects.get().state == State.REQUESTED


def test_an_event_that_comes_before_its_payment_is_committed_is_stored_and_handled_later(call, payment):
    Payment.objects.all().delete()
    assert call(an_event(Payment(pk=payment.pk))).status_code == 200
    relay()
    assert received() == []

    Payment.objects.create(pk=payment.pk, order="order-1", amount=Decimal("9.90"))
    travel(timedelta(minutes=1))
    relay()

    assert received() == [RECEIVED]


@pytest.mark.parametrize("signature", ["", "0" * 64, "ü"])
def test_an_event_with_a_missing_or_wrong_signature_is_refused(call, payment, signature):
    response = call(an_event(payment), signature=signature)

    assert response.status_code == 401
    assert published() == []
