from django.contrib import admin

from demo_shop.banks.models import Deposit, GiroAccount, SavingsAccount, Withdrawal

admin.site.register([Deposit, GiroAccount, SavingsAccount, Withdrawal])
