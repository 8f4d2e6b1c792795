"""Requesting and accepting payments, without a call to another service inside a transaction."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from decimal import Decimal

from django.conf import settings
from django.db import transaction

from demo_shop.payments.models import Alert, Payment, State
from outbox import publish

SIGNATURE_HEADER = "X-Signature"


@transaction.atomic
def request_payment(order: str, amount: Decimal) -> Payment:
    """Request the payment of an order."""
    return Payment.objects.create(order=order, amount=amount)


@transaction.atomic
def accept(event_id: str, payment_id: int, amount: Decimal) -> None:
    """Publish that a payment was received, or record an alert if its amount is wrong.

    Two events about the same payment are both published, under the same biz-id. The inbox of each handler suppresses the
    second one.

    Raises:
        Payment.DoesNotExist: the payment is not committed yet, or was never requested.
    """
    payment = Payment.objects.select_for_update().get(pk=payment_id)
    if amount != payment.amount:
        reason = f"{event_id} says {amount} was paid, and we asked for {payment.amount}"
        Alert.objects.create(payment=payment, event_id=event_id, reason=reason)
        return
    Payment.objects.filter(pk=payment.pk).update(state=State.RECEIVED)
    publish(
        "payment.received",
        {"order": payment.order, "amount": payment.amount},
        biz_id=f"payment-{payment.order}",
        key=f"order-{payment.order}",
    )


def sign(body: bytes) -> str:
    """The provider's signature of `body`."""
    return hmac.new(settings.PAYMENTS_WEBHOOK_SECRET.encode(), body, hashlib.sha256).hexdigest()


def is_signed(body: bytes, headers: Mapping[str, str]) -> bool:
    return hmac.compare_digest(sign(body).encode(), headers.get(SIGNATURE_HEADER, "").encode())
