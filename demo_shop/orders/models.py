"""The orders of customers, and their history.

Only the number of an order is unique: a handler that ran twice would leave two rows, which the audit finds.
"""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class State(models.TextChoices):
    PLACED = "placed"
    PAID = "paid"
    SHIPPED = "shipped"
    CANCELLED = "cancelled"


class Order(models.Model):
    number = models.CharField(max_length=64, unique=True)
    customer = models.CharField(max_length=64)
    product = models.CharField(max_length=64)
    quantity = models.PositiveIntegerField()
    total = models.DecimalField(max_digits=10, decimal_places=2)
    state = models.CharField(max_length=9, choices=State, default=State.PLACED)
    placed_at = models.DateTimeField("by the database's clock", db_default=Now())

    def __str__(self) -> str:
        return f"{self.number} ({self.state})"


class HistoryEntry(models.Model):
    """One line of what happened to an order; lines are only ever added."""

    class What(models.TextChoices):
        PLACED = "placed"
        PAID = "paid"
        SHIPPED = "shipped"
        CANCELLED = "cancelled"
        REMINDED = "reminded"
        REMINDER_SPARED = "reminder spared"
        RATING_CLOSED = "rating closed"
        REPORTED = "reported"

    order = models.ForeignKey(Order, on_delete=models.CASCADE, related_name="history")
    what = models.CharField(max_length=16, choices=What)
    at = models.DateTimeField("by the database's clock", db_default=Now())

    class Meta:
        verbose_name_plural = "history entries"

    def __str__(self) -> str:
        return f"{self.order_id}: {self.what}"


class Rating(models.Model):
    order = models.ForeignKey(Order, on_delete=models.CASCADE, related_name="ratings")
    stars = models.PositiveSmallIntegerField()
    by_itself = models.BooleanField("given because the customer was silent", default=False)
    given_at = models.DateTimeField("by the database's clock", db_default=Now())

    def __str__(self) -> str:
        return "★" * self.stars
