"""The audit log of the inbox."""

from __future__ import annotations

from django.contrib import admin

from inbox.models import AuditEntry
from outbox.console.audit_admin import AuditAdmin

admin.site.register(AuditEntry, AuditAdmin)
