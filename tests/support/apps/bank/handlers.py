from django.db.models import F

from inbox import idempotent_handler
from tests.support.apps.effects.models import Account


@idempotent_handler("bank.transfer", name="bank.credit")
def credit(message):
    Account.objects.filter(owner=message.payload["owner"]).update(balance=F("balance") + message.payload["amount"])
