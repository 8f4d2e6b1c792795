"""The notices sent to customers. An order number is not unique: a second notice must be visible, not hidden."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class Notice(models.Model):
    class Kind(models.TextChoices):
        SMS = "SMS"
        REVIEW_REQUEST = "review request"

    kind = models.CharField(max_length=14, choices=Kind)
    order = models.CharField("order number", max_length=64, db_index=True)
    customer = models.CharField(max_length=64)
    sent_at = models.DateTimeField("by the database's clock", db_default=Now())

    def __str__(self) -> str:
        return f"{self.kind} to {self.customer} about {self.order}"


class MailAttempt(models.Model):
    """One line in the records of the mail provider, which are not the shop's own (see `mail_provider`)."""

    order = models.CharField("order number", max_length=64, db_index=True)
    idempotency_key = models.CharField(max_length=64, db_index=True)
    accepted = models.BooleanField()
    at = models.DateTimeField("by the database's clock", db_default=Now())

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=["idempotency_key"], condition=models.Q(accepted=True), name="one_mail_per_key"),
        )

    def __str__(self) -> str:
        return f"receipt for {self.order} ({'accepted' if self.accepted else 'refused'})"
