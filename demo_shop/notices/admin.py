from django.contrib import admin

from demo_shop.notices.models import MailAttempt, ReviewRequest, Sms

admin.site.register([MailAttempt, ReviewRequest, Sms])
