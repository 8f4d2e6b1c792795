"""What can be done with an order. Each function is one transaction: the change and what others are told of it."""

from __future__ import annotations

import uuid
from decimal import Decimal

from django.conf import settings
from django.db import transaction

from demo_shop.orders.models import HistoryEntry, Order, State
from outbox import publish

What = HistoryEntry.What


class AlreadyRated(Exception):
    """The order has its rating."""


@transaction.atomic
def place_order(customer: str, product: str, quantity: int, total: Decimal, *, number: str = "") -> Order:
    """Take an order.

    Args:
        number: what the checkout page has called it; default: a new one.
    """
    order = Order.objects.create(
        number=number or uuid.uuid4().hex, customer=customer, product=product, quantity=quantity, total=total
    )
    order.history.create(what=What.PLACED)
    announce(order)
    publish(
        "shop.order.rate_by_itself",
        {"order": order.number},
        biz_id=f"rating-{order.number}",
        delay=settings.SHOP_RATE_AFTER,
    )
    return order


@transaction.atomic
def announce(order: Order) -> None:
    """Tell everybody that `order` was placed. Telling it again is harmless: the biz-id is the order's own."""
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
    )


@transaction.atomic
def mark_paid(number: str) -> None:
    """Raises Order.DoesNotExist."""
    order = _locked(number)
    order.history.create(what=What.PAID)
    # The shipment may be faster than this message: they travel through different queues.
    Order.objects.filter(pk=order.pk, state=State.PLACED).update(state=State.PAID)


@transaction.atomic
def mark_shipped(number: str) -> None:
    """Raises Order.DoesNotExist."""
    order = _locked(number)
    order.history.create(what=What.SHIPPED)
    Order.objects.filter(pk=order.pk).update(state=State.SHIPPED)


@transaction.atomic
def rate(number: str, stars: int) -> None:
    """Raises AlreadyRated, Order.DoesNotExist."""
    order = _locked(number)
    if order.ratings.exists():
        raise AlreadyRated(number)
    order.ratings.create(stars=stars)


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
