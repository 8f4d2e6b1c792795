"""The alerts of the outbox."""

from __future__ import annotations

from django.contrib import admin

from outbox.console.alert_admin import AlertAdmin
from outbox.models import Alert

admin.site.register(Alert, AlertAdmin)
