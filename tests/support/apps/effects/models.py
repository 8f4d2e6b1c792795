"""What the handlers of the tests do: rows that can be counted."""

from django.db import models


class Effect(models.Model):
    """Something happened. No constraint prevents a second one, so that a test can see it."""

    name = models.CharField(max_length=200)
    detail = models.CharField(max_length=200, blank=True)
    at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.name} {self.detail}".strip()


class Unique(models.Model):
    """Something that cannot happen twice: the second one is a database error."""

    name = models.CharField(max_length=200, unique=True)

    def __str__(self) -> str:
        return self.name


class Account(models.Model):
    """The balance of an account at one bank; each bank has a database of its own."""

    owner = models.CharField(max_length=100, unique=True)
    balance = models.IntegerField()

    def __str__(self) -> str:
        return f"{self.owner}: {self.balance}"


class Booking(models.Model):
    """A transfer was debited; without an amount, it never will be."""

    transfer = models.CharField(max_length=100, unique=True)
    amount = models.IntegerField()

    def __str__(self) -> str:
        return f"{self.transfer}: {self.amount}"


class Payment(models.Model):
    """What the bank has charged for an order, by the bank's name of it."""

    reference = models.CharField(max_length=100, unique=True)
    order = models.CharField(max_length=100)
    shelf = models.CharField(max_length=100)

    def __str__(self) -> str:
        return f"{self.reference} for order {self.order}"
