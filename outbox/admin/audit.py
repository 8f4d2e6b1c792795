"""The audit log of the outbox."""

from __future__ import annotations

from django.contrib import admin

from outbox.console.audit_admin import AuditAdmin
from outbox.models import AuditEntry

admin.site.register(AuditEntry, AuditAdmin)
