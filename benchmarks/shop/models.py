from __future__ import annotations

from django.db import models


class Account(models.Model):
    """The row that a business transaction changes."""

    balance = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return f"account {self.pk}: {self.balance}"


class Sale(models.Model):
    """Written in the transaction that publishes, so that the row's own xmin identifies its commit."""

    number = models.BigIntegerField(primary_key=True)

    def __str__(self) -> str:
        return f"sale {self.number}"


class Effect(models.Model):
    """Written by the handler of the message about a sale."""

    number = models.BigIntegerField()

    def __str__(self) -> str:
        return f"effect of sale {self.number}"
