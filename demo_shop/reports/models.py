"""The sales report. Nothing here is unique: an order reported twice must be visible, not hidden."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models.functions import Now


class ReportLine(models.Model):
    order = models.CharField("order number", max_length=64, db_index=True)
    amount = models.DecimalField(max_digits=10, decimal_places=2)
    at = models.DateTimeField("by the database's clock", db_default=Now())

    objects: ClassVar[models.Manager[ReportLine]]

    def __str__(self) -> str:
        return f"{self.amount} for {self.order}"
