from django.contrib import admin

from demo_shop.payments.models import Alert, Payment, ProviderEvent

admin.site.register([Alert, Payment, ProviderEvent])
