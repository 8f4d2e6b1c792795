"""Taking money, without talking to anybody inside a transaction."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum

from django.conf import settings
from django.db import transaction

from demo_shop.payments.models import Alert, Payment, ProviderEvent, State
from outbox import publish


@dataclass(frozen=True, kw_only=True)
class Notice:
    """One event of the provider: so much was paid. `body` is what it signed."""

    event_id: str
    payment_id: int
    amount: Decimal
    body: bytes


class Answer(Enum):
    """What became of a notice."""

    ACCEPTED = "accepted"
    KNOWN = "known"
    CONTRADICTION = "contradiction"


@transaction.atomic
def request_payment(order: str, amount: Decimal) -> Payment:
    """Ask for the money of an order."""
    return Payment.objects.create(order=order, amount=amount)


@transaction.atomic
def accept(notice: Notice) -> Answer:
    """Store what the provider says and tell the shop, both or neither; the same event a second time changes nothing.

    Two events that tell of the same payment are both stored, and told under the same biz-id: that they are one fact is
    for the inbox of each listener to see.

    Raises:
        Payment.DoesNotExist: it speaks of a payment nobody asked for.
    """
    payment = Payment.objects.select_for_update().get(pk=notice.payment_id)
    if contradiction := _contradiction(notice, payment):
        Alert.objects.create(payment=payment, event_id=notice.event_id, reason=contradiction)
        return Answer.CONTRADICTION
    _, is_new = ProviderEvent.objects.get_or_create(
        event_id=notice.event_id, defaults={"payment": payment, "amount": notice.amount, "body": notice.body}
    )
    if not is_new:
        return Answer.KNOWN
    Payment.objects.filter(pk=payment.pk).update(state=State.RECEIVED)
    publish(
        "payment.received",
        {"order": payment.order, "amount": payment.amount},
        biz_id=f"payment-{payment.order}",
        key=f"order-{payment.order}",
    )
    publish(
        "payments.exported",
        {"order": payment.order, "amount": payment.amount},
        biz_id=f"payment-export-{payment.order}",
        key=f"order-{payment.order}",
    )
    return Answer.ACCEPTED


def sign(body: bytes) -> str:
    """The provider's signature of `body`."""
    return hmac.new(settings.PAYMENTS_WEBHOOK_SECRET.encode(), body, hashlib.sha256).hexdigest()


def is_signed(body: bytes, signature: str) -> bool:
    return hmac.compare_digest(sign(body).encode(), signature.encode())


def _contradiction(notice: Notice, payment: Payment) -> str:
    if notice.amount != payment.amount:
        return f"{notice.event_id} says {notice.amount} was paid, and we asked for {payment.amount}"
    stored = ProviderEvent.objects.filter(event_id=notice.event_id).first()
    if stored and stored.payment_id != payment.pk:
        return f"{notice.event_id} told of payment {stored.payment_id} before, and now of {payment.pk}"
    return ""
