"""The books of both banks.

The name of a withdrawal is unique: whoever writes it first, the customer or the checker, decides whether there is one. A
deposit's is not, or a doubled one would be hidden.
"""

from __future__ import annotations

from django.db import models


class SavingsAccount(models.Model):
    holder = models.CharField(max_length=64, unique=True)
    balance = models.PositiveIntegerField()

    def __str__(self) -> str:
        return f"{self.balance} of {self.holder}"


class Withdrawal(models.Model):
    """Money that has left the savings bank; an amount of 0 is a tombstone, which says that none has and none will."""

    transfer = models.CharField(max_length=64, unique=True)
    amount = models.PositiveIntegerField()

    def __str__(self) -> str:
        return f"{self.amount} by {self.transfer}" if self.amount else f"no {self.transfer}"


class GiroAccount(models.Model):
    holder = models.CharField(max_length=64, unique=True)
    balance = models.PositiveIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.balance} of {self.holder}"


class Deposit(models.Model):
    """Money that has arrived at the giro bank."""

    transfer = models.CharField(max_length=64, db_index=True)
    amount = models.PositiveIntegerField()

    def __str__(self) -> str:
        return f"{self.amount} by {self.transfer}"
