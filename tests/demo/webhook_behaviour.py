"""The webhook that the payment provider calls. Run by test_webhook.py under the settings of the shop."""

import json
from decimal import Decimal

import pytest
from django.apps import apps

from demo_shop.payments.models import Alert, Payment, ProviderEvent, State
from demo_shop.payments.services import request_payment, sign

pytestmark = pytest.mark.django_db


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


def published():
    """The messages that were published: topic, biz-id, payload."""
    messages = apps.get_model("outbox", "OutboxMessage").objects.order_by("pk")
    return [(message.topic, message.biz_id, json.loads(bytes(message.body))) for message in messages]


PAYMENT_RECEIVED = ("payment.received", "payment-order-1", {"order": "order-1", "amount": "9.90"})


def test_a_signed_event_is_stored_and_published(call, payment):
    response = call(an_event(payment))

    assert response.status_code == 200
    assert published() == [PAYMENT_RECEIVED]
    event = ProviderEvent.objects.get()
    assert (event.event_id, event.amount, bytes(event.body)) == ("evt-1", Decimal("9.90"), an_event(payment))
    assert Payment.objects.get().state == State.RECEIVED


def test_a_repeated_event_gets_the_same_answer_and_changes_nothing(call, payment):
    call(an_event(payment))

    response = call(an_event(payment))

    assert response.status_code == 200
    assert published() == [PAYMENT_RECEIVED]
    assert ProviderEvent.objects.count() == 1


def test_a_second_event_for_the_same_payment_is_published_with_the_same_biz_id(call, payment):
    """The webhook cannot know that it is the same fact; the inbox of every consumer deduplicates it."""
    call(an_event(payment))

    response = call(an_event(payment, event_id="evt-2"))

    assert response.status_code == 200
    assert published() == [PAYMENT_RECEIVED, PAYMENT_RECEIVED]


def test_the_same_event_with_another_amount_is_a_conflict_that_raises_an_alert(call, payment):
    call(an_event(payment))

    response = call(an_event(payment, amount="10.90"))

    assert response.status_code == 409
    assert published() == [PAYMENT_RECEIVED]
    assert Alert.objects.get().reason == "evt-1 says 10.90 was paid, and we asked for 9.90"


def test_after_a_first_event_with_another_amount_the_right_one_is_still_accepted(call, payment):
    assert call(an_event(payment, amount="0.01")).status_code == 409
    assert published() == []

    assert call(an_event(payment)).status_code == 200
    assert published() == [PAYMENT_RECEIVED]


def test_the_same_event_for_another_payment_is_a_conflict(call, payment):
    another = request_payment("order-2", Decimal("9.90"))
    call(an_event(payment))

    response = call(an_event(another))

    assert response.status_code == 409
    assert published() == [PAYMENT_RECEIVED]
    assert Alert.objects.get().payment == another


@pytest.mark.parametrize("signature", ["", "0" * 64, "ü"])
def test_an_event_with_a_missing_or_wrong_signature_is_refused(call, payment, signature):
    response = call(an_event(payment), signature=signature)

    assert response.status_code == 403
    assert published() == []
    assert not ProviderEvent.objects.exists()


def test_the_signature_covers_the_raw_bytes_of_the_body(call, payment):
    """The same JSON in other bytes has another signature."""
    response = call(an_event(payment) + b" ", signature=sign(an_event(payment)))

    assert response.status_code == 403
    assert published() == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b"{}",
        b'{"id": "evt-1", "payment": 1, "amount": "nine"}',
        b'{"id": "evt-1", "payment": 1, "amount": "NaN"}',
        b'{"id": "evt-1", "payment": "one", "amount": "9.90"}',
        b'{"id": "evt-1", "payment": null, "amount": "9.90"}',
    ],
)
def test_a_signed_body_that_cannot_be_read_is_refused(call, payment, body):
    assert call(body).status_code == 400
    assert published() == []


def test_an_event_for_an_unknown_payment_is_not_found(call, payment):
    response = call(json.dumps({"id": "evt-1", "payment": payment.pk + 1, "amount": "9.90"}).encode())

    assert response.status_code == 404
    assert published() == []


def test_the_webhook_refuses_get_requests(client):
    assert client.get("/payments/webhook/").status_code == 405


def test_an_event_is_not_stored_when_its_message_cannot_be_published(call, payment, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("the outbox is full")

    monkeypatch.setattr("demo_shop.payments.services.publish", fail)

    with pytest.raises(RuntimeError, match="the outbox is full"):
        call(an_event(payment))

    assert not ProviderEvent.objects.exists()
    assert Payment.objects.get().state == State.REQUESTED
