from django.contrib import admin

from demo_shop.notices.models import Sms

admin.site.register(Sms)
