"""Shipments. Nothing here is unique: an order shipped twice must be visible, not hidden."""

from __future__ import annotations

from django.db import models


class Shipment(models.Model):
    order = models.CharField("order number", max_length=64, db_index=True)
    sent_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.order
