from django.contrib import admin

from demo_shop.payments.models import Alert, Payment

admin.site.register([Alert, Payment])
