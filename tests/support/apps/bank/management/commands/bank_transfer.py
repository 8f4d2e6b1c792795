from django.core.management.base import BaseCommand

from tests.support.apps.bank.transfers import transfer


class Command(BaseCommand):
    help = "Transfer an amount of money of one owner."

    def add_arguments(self, parser):
        parser.add_argument("transfer_id")
        parser.add_argument("owner")
        parser.add_argument("amount", type=int)

    def handle(self, *, transfer_id, owner, amount, **options):
        transfer(transfer_id, owner, amount)
