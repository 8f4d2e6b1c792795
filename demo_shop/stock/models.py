"""The products in stock, and what leaves it.

The order of a movement or a shipment is not unique: a second one must be visible, not hidden.
"""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class Product(models.Model):
    sku = models.CharField(max_length=64, unique=True)
    quantity = models.PositiveIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.quantity} of {self.sku}"


class StockMovement(models.Model):
    """Goods delivered (positive) or reserved (negative); a product's quantity is the sum of its movements."""

    product = models.ForeignKey(Product, on_delete=models.PROTECT, related_name="movements")
    order = models.CharField("order number, empty for a delivery", max_length=64, default="", blank=True, db_index=True)
    quantity = models.IntegerField()
    at = models.DateTimeField("by the database's clock", db_default=Now())

    def __str__(self) -> str:
        return f"{self.quantity:+} for {self.order or 'the shelf'}"


class Shipment(models.Model):
    order = models.CharField("order number", max_length=64, db_index=True)
    sent_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.order
