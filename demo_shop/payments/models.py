"""Money asked for, and what the provider said about it. Only the provider's own event id is unique."""

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


class ProviderEvent(models.Model):
    """What the provider told us, once per event however often it calls."""

    event_id = models.CharField(max_length=128, unique=True)
    payment = models.ForeignKey(Payment, on_delete=models.CASCADE, related_name="events")
    amount = models.DecimalField(max_digits=10, decimal_places=2)
    body = models.BinaryField("as it was signed")
    received_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.event_id


class Alert(models.Model):
    """The provider contradicted itself or us; a person has to look."""

    payment = models.ForeignKey(Payment, on_delete=models.CASCADE, related_name="alerts")
    event_id = models.CharField(max_length=128)
    reason = models.TextField()
    raised_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.reason
