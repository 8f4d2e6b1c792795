"""Goods come and go, each time in one transaction with its movement and with what others are told."""

from __future__ import annotations

from decimal import Decimal

from django.db import transaction
from django.db.models import F

from demo_shop.stock.models import Product
from outbox import publish


class OutOfStock(Exception):
    """Not enough of it on the shelf now."""


@transaction.atomic
def reserve(order: str, sku: str, quantity: int, total: str | Decimal) -> None:
    """Take goods off the shelf for an order.

    Args:
        total: what the order costs; it travels on to those who ask for the money.

    Raises:
        OutOfStock: nothing was taken.
        Product.DoesNotExist: there is no such product.
    """
    product = Product.objects.get(sku=sku)
    if not Product.objects.filter(pk=product.pk, quantity__gte=quantity).update(quantity=F("quantity") - quantity):
        raise OutOfStock(sku)
    product.movements.create(order=order, quantity=-quantity)
    publish("stock.reserved", {"order": order, "total": total}, biz_id=f"stock-{order}", key=f"order-{order}")


@transaction.atomic
def deliver(sku: str, quantity: int) -> None:
    """Put goods on the shelf; a new product gets its place."""
    product, _ = Product.objects.get_or_create(sku=sku)
    Product.objects.filter(pk=product.pk).update(quantity=F("quantity") + quantity)
    product.movements.create(quantity=quantity)
