"""What customers were told. Nothing here is unique: a customer told twice must be visible, not hidden."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class Sms(models.Model):
    order = models.CharField("order number", max_length=64, db_index=True)
    customer = models.CharField(max_length=64)
    sent_at = models.DateTimeField("by the database's clock", db_default=Now())

    class Meta:
        verbose_name = "SMS"
        verbose_name_plural = "SMS"

    def __str__(self) -> str:
        return f"to {self.customer} about {self.order}"
