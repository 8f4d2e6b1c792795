"""Moving money from one bank to the other."""

from __future__ import annotations

from collections.abc import Callable

from django.db import IntegrityError, transaction
from django.db.models import F

from demo_shop.banks.models import Deposit, GiroAccount, SavingsAccount, Withdrawal
from demo_shop.banks.router import SAVINGS
from outbox import prepare

TRANSFER = "banks.transfer.withdrawn"


class Refused(Exception):
    """No money was moved, and the transfer of this name will never be made."""


def transfer(name: str, holder: str, amount: int, *, pause: Callable[[], None] = lambda: None) -> None:
    """Move money of `holder` from the savings bank to the giro bank. A handler deposits it there.

    Once prepared, the transfer is made or refused, even if this process dies. Any other exception than Refused leaves it
    undecided until the checker has decided.

    Args:
        pause: called before and after the withdrawal, where the death of the process is most harmful.

    Raises:
        Refused: the account has not enough money, or the checker has ruled the transfer out.
    """
    payload = {"transfer": name, "holder": holder, "amount": amount}
    with prepare(TRANSFER, payload, biz_id=f"transfer-{name}") as half:
        pause()
        try:
            withdraw(name, holder, amount)
        except Refused:
            half.rollback()
            raise
        pause()


@transaction.atomic(using=SAVINGS)
def withdraw(name: str, holder: str, amount: int) -> None:
    """Raises Refused."""
    try:
        with transaction.atomic(using=SAVINGS):
            Withdrawal.objects.create(transfer=name, amount=amount)
    except IntegrityError as error:
        raise Refused(f"{name} was given up before the money could be withdrawn") from error
    account = SavingsAccount.objects.filter(holder=holder, balance__gte=amount)
    if not account.update(balance=F("balance") - amount):
        raise Refused(f"{holder} has less than {amount}")


@transaction.atomic(using=SAVINGS)
def was_withdrawn(name: str) -> bool:
    """Has the money left the savings bank? If not, it never will: this writes a tombstone under the name of the withdrawal.

    The name of an uncommitted withdrawal is locked, so this waits until its transaction has ended.
    """
    withdrawal, _ = Withdrawal.objects.get_or_create(transfer=name, defaults={"amount": 0})
    return withdrawal.amount > 0


@transaction.atomic
def deposit(name: str, holder: str, amount: int) -> None:
    """Book a deposit at the giro bank."""
    Deposit.objects.create(transfer=name, amount=amount)
    GiroAccount.objects.filter(holder=holder).update(balance=F("balance") + amount)


def open_accounts(holder: str, amount: int) -> None:
    """An account at both banks, with all the money at the savings bank."""
    SavingsAccount.objects.create(holder=holder, balance=amount)
    GiroAccount.objects.create(holder=holder)
