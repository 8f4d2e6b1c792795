"""The running relays, with their rates and the dependencies that they wait for."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from outbox.console.acting_admin import counted
from outbox.console.display import NOTHING, age
from outbox.console.process_admin import ProcessAdmin
from outbox.models import OutboxMessage, RelayHeartbeat
from outbox.states import State


@admin.register(RelayHeartbeat)
class RelayAdmin(ProcessAdmin):
    title = _("Relays")
    noun = _("relay")
    list_display = ("process", "state", "started", "heartbeat", "last_pass", "published_count", "rate_now")
    fields: ClassVar[Any] = list_display
    readonly_fields: ClassVar[Any] = list_display

    def none_runs(self) -> str:
        if self.processes().filter(silent=False).exists():
            return ""
        ready = OutboxMessage.objects.using(self.using).filter(state=State.READY)
        return gettext("No relay is running. Messages that are ready: %(count)s.") % {"count": counted(ready)}

    def is_starting(self, row: Any) -> bool:
        return row.last_pass_at is None

    @admin.display(description=_("last successful pass"))
    def last_pass(self, row: Any) -> SafeString:
        return age(row.last_pass_at, row.database_now)

    @admin.display(description=_("published"))
    def published_count(self, row: Any) -> str:
        return f"{row.published:,}"

    @admin.display(description=_("per second"))
    def rate_now(self, row: Any) -> str:
        # The present rate of a silent relay is unknown.
        return NOTHING if row.silent else f"{row.rate:,.1f}"
