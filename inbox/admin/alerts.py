"""The alerts of the inbox."""

from __future__ import annotations

from django.contrib import admin

from inbox.models import Alert
from outbox.console.alert_admin import AlertAdmin

admin.site.register(Alert, AlertAdmin)
