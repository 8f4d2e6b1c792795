"""Requested payments. A notification of the provider is a message whose biz-id is the provider's event id."""

from __future__ import annotations

from django.db import models


class State(models.TextChoices):
    REQUESTED = "requested"
    RECEIVED = "received"


class Payment(models.Model):
    order = models.CharField("order number", max_length=64, db_index=True)
    amount = models.DecimalField(max_digits=10, decimal_places=2)
    state = models.CharField(max_length=10, choices=State, default=State.REQUESTED, db_index=True)

    def __str__(self) -> str:
        return f"{self.amount} for {self.order} ({self.state})"


class Alert(models.Model):
    """A notification of the provider contradicts our records; a person has to decide."""

    payment = models.ForeignKey(Payment, on_delete=models.CASCADE, related_name="alerts")
    event_id = models.CharField(max_length=128)
    reason = models.TextField()
    raised_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.reason
