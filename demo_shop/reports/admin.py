from django.contrib import admin

from demo_shop.reports.models import ReportLine

admin.site.register(ReportLine)
