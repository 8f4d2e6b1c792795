from django.db import transaction
from django.db.models import F

from outbox import prepare
from tests.support.apps.bank import SAVINGS
from tests.support.apps.effects.models import Account, Booking


class Insufficient(Exception):
    """The account has not enough money."""


def transfer(transfer_id, owner, amount):
    with prepare("bank.transfer", {"owner": owner, "amount": amount}, biz_id=transfer_id) as half:
        try:
            with transaction.atomic(using=SAVINGS):
                debit(transfer_id, owner, amount)
        except Insufficient:
            half.rollback()  # nothing was committed, and this code will not try again
            raise


def debit(transfer_id, owner, amount):
    Booking.objects.using(SAVINGS).create(transfer=transfer_id, amount=amount)  # `transfer` is unique
    account = Account.objects.using(SAVINGS).filter(owner=owner, balance__gte=amount)
    if not account.update(balance=F("balance") - amount):
        raise Insufficient
