"""The operations on an order. Each function is one transaction: the change and the messages about it.

All that take the number of an order raise Order.DoesNotExist.
"""

from __future__ import annotations

import uuid
from decimal import Decimal

from django.conf import settings
from django.db import transaction

from demo_shop.orders.models import HistoryEntry, Order, State
from outbox import cancel, publish

What = HistoryEntry.What
_PUBLISHED_WITH_AN_ORDER = {
    "shop.order.placed": "order",
    "shop.order.sms_due": "sms",
    "shop.order.unpaid": "unpaid",
    "shop.order.review_due": "review",
}
"""Topics, and the prefix of the order number in the biz-id of each."""


class AlreadyRated(Exception):
    """The order has its rating."""


class TooLate(Exception):
    """The order was already announced."""


@transaction.atomic
def place_order(customer: str, product: str, quantity: int, total: Decimal, *, number: str = "") -> Order:
    """Accept an order. It is announced when the customer can no longer cancel it.

    Args:
        number: the number that the checkout page has chosen; default: a new one.
    """
    number = number or uuid.uuid4().hex
    order = Order.objects.create(number=number, customer=customer, product=product, quantity=quantity, total=total)
    order.history.create(what=What.PLACED)
    announce(order)
    addressee = {"order": number, "customer": customer}
    publish("shop.order.sms_due", addressee, biz_id=f"sms-{number}", delay=settings.SHOP_SMS_AFTER)
    publish("shop.order.unpaid", {"order": number}, biz_id=f"unpaid-{number}", delay=settings.SHOP_UNPAID_AFTER)
    publish("shop.order.review_due", addressee, biz_id=f"review-{number}", delay=settings.SHOP_REVIEW_AFTER)
    return order


@transaction.atomic
def announce(order: Order) -> None:
    """Publish that `order` was placed, due when it can no longer be cancelled.

    Publishing it again is harmless: the biz-id is that of the order.
    """
    publish(
        "shop.order.placed",
        {"order": order.number, "product": order.product, "quantity": order.quantity, "total": order.total},
        biz_id=f"order-{order.number}",
        key=f"customer-{order.customer}",
        delay=settings.SHOP_TAKE_BACK_WITHIN,
    )


@transaction.atomic
def take_back(number: str) -> None:
    """Cancel an order and all messages about it. Raises TooLate: nothing was changed."""
    order = _locked(number)
    for topic, name in _PUBLISHED_WITH_AN_ORDER.items():
        decision = cancel(topic=topic, biz_id=f"{name}-{number}")
        if not decision:
            raise TooLate(f"{topic} of {number} is {decision.state}")
    order.history.create(what=What.CANCELLED)
    Order.objects.filter(pk=order.pk).update(state=State.CANCELLED)


@transaction.atomic
def mark_paid(number: str) -> None:
    order = _locked(number)
    order.history.create(what=What.PAID)
    if cancel(topic="shop.order.unpaid", biz_id=f"unpaid-{number}"):
        order.history.create(what=What.REMINDER_SPARED)
    # The message about the shipment may arrive before this one: they are in different queues.
    Order.objects.filter(pk=order.pk, state=State.PLACED).update(state=State.PAID)


@transaction.atomic
def remind(number: str) -> None:
    """Send a reminder, unless the order was paid before this message arrived."""
    order = _locked(number)
    is_paid = order.history.filter(what=What.PAID).exists()
    order.history.create(what=What.REMINDER_SPARED if is_paid else What.REMINDED)


@transaction.atomic
def mark_shipped(number: str) -> None:
    """The order is complete; from now on the customer has `SHOP_RATE_AFTER` to rate it."""
    order = _locked(number)
    order.history.create(what=What.SHIPPED)
    Order.objects.filter(pk=order.pk).update(state=State.SHIPPED)
    if order.ratings.exists():
        order.history.create(what=What.RATING_CLOSED)
    else:
        publish("shop.order.rate_by_itself", {"order": number}, biz_id=f"rating-{number}", delay=settings.SHOP_RATE_AFTER)


def report_sale(number: str) -> None:
    """The order is paid and shipped."""
    Order.objects.get(number=number).history.create(what=What.REPORTED)


@transaction.atomic
def rate(number: str, stars: int) -> None:
    """Store the customer's own rating, and cancel the message that would give five stars. Raises AlreadyRated.

    If that message was already sent, its handler finds this rating and does nothing.
    """
    order = _locked(number)
    if order.ratings.exists():
        raise AlreadyRated(number)
    order.ratings.create(stars=stars)
    if cancel(topic="shop.order.rate_by_itself", biz_id=f"rating-{number}"):
        order.history.create(what=What.RATING_CLOSED)


@transaction.atomic
def close_rating(number: str) -> None:
    """Give five stars, unless the customer has rated the order."""
    order = _locked(number)
    order.history.create(what=What.RATING_CLOSED)
    if not order.ratings.exists():
        order.ratings.create(stars=5, by_itself=True)


def _locked(number: str) -> Order:
    return Order.objects.select_for_update().get(number=number)
