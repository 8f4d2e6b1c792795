"""What can be done with an order. Each function is one transaction: the change and what others are told of it."""

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
"""Topics, and what stands before the order number in the biz-id of each."""


class AlreadyRated(Exception):
    """The order has its rating."""


class TooLate(Exception):
    """Others have been told of the order."""


@transaction.atomic
def place_order(customer: str, product: str, quantity: int, total: Decimal, *, number: str = "") -> Order:
    """Take an order. Nobody is told of it until the customer can no longer take it back.

    Args:
        number: what the checkout page has called it; default: a new one.
    """
    order = Order.objects.create(
        number=number or uuid.uuid4().hex, customer=customer, product=product, quantity=quantity, total=total
    )
    order.history.create(what=What.PLACED)
    announce(order)
    publish(
        "shop.order.sms_due",
        {"order": order.number, "customer": order.customer},
        biz_id=f"sms-{order.number}",
        delay=settings.SHOP_SMS_AFTER,
    )
    publish("shop.order.unpaid", {"order": order.number}, biz_id=f"unpaid-{order.number}", delay=settings.SHOP_UNPAID_AFTER)
    publish(
        "shop.order.review_due",
        {"order": order.number, "customer": order.customer},
        biz_id=f"review-{order.number}",
        delay=settings.SHOP_REVIEW_AFTER,
    )
    return order


@transaction.atomic
def take_back(number: str) -> None:
    """Cancel an order, and with it all that was to be said of it. Either all of that is in time or nothing is done.

    Raises:
        TooLate, Order.DoesNotExist: nothing was changed.
    """
    order = _locked(number)
    for topic, name in _PUBLISHED_WITH_AN_ORDER.items():
        decision = cancel(topic=topic, biz_id=f"{name}-{number}")
        if not decision:
            raise TooLate(f"{topic} of {number} is {decision.state}")
    order.history.create(what=What.CANCELLED)
    Order.objects.filter(pk=order.pk).update(state=State.CANCELLED)


@transaction.atomic
def announce(order: Order) -> None:
    """Tell everybody that `order` was placed, when it is too late to take it back.

    Telling it again is harmless: the biz-id is the order's own.
    """
    publish(
        "shop.order.placed",
        {
            "order": order.number,
            "customer": order.customer,
            "product": order.product,
            "quantity": order.quantity,
            "total": order.total,
        },
        biz_id=f"order-{order.number}",
        key=f"customer-{order.customer}",
        delay=settings.SHOP_TAKE_BACK_WITHIN,
    )


@transaction.atomic
def mark_paid(number: str) -> None:
    """Raises Order.DoesNotExist."""
    order = _locked(number)
    order.history.create(what=What.PAID)
    if cancel(topic="shop.order.unpaid", biz_id=f"unpaid-{number}"):
        order.history.create(what=What.REMINDER_SPARED)
    # The shipment may be faster than this message: they travel through different queues.
    Order.objects.filter(pk=order.pk, state=State.PLACED).update(state=State.PAID)


@transaction.atomic
def remind(number: str) -> None:
    """Ask for the money, unless it has come while this was on its way.

    Raises Order.DoesNotExist.
    """
    order = _locked(number)
    is_paid = order.history.filter(what=What.PAID).exists()
    order.history.create(what=What.REMINDER_SPARED if is_paid else What.REMINDED)


@transaction.atomic
def mark_shipped(number: str) -> None:
    """The order is complete; from now on the customer has so long to rate it.

    Raises Order.DoesNotExist.
    """
    order = _locked(number)
    order.history.create(what=What.SHIPPED)
    Order.objects.filter(pk=order.pk).update(state=State.SHIPPED)
    if order.ratings.exists():
        order.history.create(what=What.RATING_CLOSED)
    else:
        publish("shop.order.rate_by_itself", {"order": number}, biz_id=f"rating-{number}", delay=settings.SHOP_RATE_AFTER)


@transaction.atomic
def rate(number: str, stars: int) -> None:
    """The customer's own rating. The five stars that were to come by themselves are taken back with it.

    If they are on their way already, they find this one when they come.

    Raises AlreadyRated, Order.DoesNotExist.
    """
    order = _locked(number)
    if order.ratings.exists():
        raise AlreadyRated(number)
    order.ratings.create(stars=stars)
    if cancel(topic="shop.order.rate_by_itself", biz_id=f"rating-{number}"):
        order.history.create(what=What.RATING_CLOSED)


@transaction.atomic
def close_rating(number: str) -> None:
    """Nobody has complained in time: five stars, unless the customer has said something else.

    Raises Order.DoesNotExist.
    """
    order = _locked(number)
    order.history.create(what=What.RATING_CLOSED)
    if not order.ratings.exists():
        order.ratings.create(stars=5, by_itself=True)


def _locked(number: str) -> Order:
    return Order.objects.select_for_update().get(number=number)
