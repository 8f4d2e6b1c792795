"""Deliver, reserve and ship goods. Each function is one transaction: the change and the message about it."""

from __future__ import annotations

from decimal import Decimal

from django.db import transaction
from django.db.models import F

from demo_shop.stock.models import Product, Shipment
from outbox import publish


class OutOfStock(Exception):
    """The stock of the product is too low now."""


@transaction.atomic
def reserve(order: str, sku: str, quantity: int, total: str | Decimal) -> None:
    """Reserve goods for an order.

    Args:
        total: the price of the order; the message contains it for the request of the payment.

    Raises:
        OutOfStock: nothing was reserved.
        Product.DoesNotExist: there is no such product.
    """
    product = Product.objects.get(sku=sku)
    if not Product.objects.filter(pk=product.pk, quantity__gte=quantity).update(quantity=F("quantity") - quantity):
        raise OutOfStock(sku)
    product.movements.create(order=order, quantity=-quantity)
    publish("stock.reserved", {"order": order, "total": total}, biz_id=f"stock-{order}", key=f"order-{order}")


@transaction.atomic
def ship(order: str) -> None:
    Shipment.objects.create(order=order)
    publish("shipment.sent", {"order": order}, biz_id=f"shipment-{order}", key=f"order-{order}")


@transaction.atomic
def deliver(sku: str, quantity: int) -> None:
    """Add goods to the stock; an unknown product is created."""
    product, _ = Product.objects.get_or_create(sku=sku)
    Product.objects.filter(pk=product.pk).update(quantity=F("quantity") + quantity)
    product.movements.create(quantity=quantity)
