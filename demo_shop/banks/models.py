"""The books of both banks.

The name of a withdrawal is unique: the customer or the checker, whichever writes it first, decides whether there is one. The
name of a deposit is not unique, because a constraint would hide a doubled one.
"""

from __future__ import annotations

from django.db import models


class SavingsAccount(models.Model):
    holder = models.CharField(max_length=64, unique=True)
    balance = models.PositiveIntegerField()

    def __str__(self) -> str:
        return f"{self.balance} of {self.holder}"


class Withdrawal(models.Model):
    """Money withdrawn at the savings bank. An amount of 0 is a tombstone: nothing was withdrawn and nothing will be."""

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
    """Money deposited at the giro bank."""

    transfer = models.CharField(max_length=64, db_index=True)
    amount = models.PositiveIntegerField()

    def __str__(self) -> str:
        return f"{self.amount} by {self.transfer}"
