from django.contrib import admin

from demo_shop.notices.models import MailAttempt, Notice

admin.site.register([MailAttempt, Notice])
