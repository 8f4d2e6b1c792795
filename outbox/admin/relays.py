"""The running relays, with their rates and the dependencies that they wait for."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.admin.acting import counted
from exactly_once.admin.processes import ProcessAdmin, requests
from exactly_once.display import NOTHING, age, stacked
from outbox.models import SHARDS, OutboxMessage, RelayHeartbeat
from outbox.states import State


@admin.register(RelayHeartbeat)
class RelayAdmin(ProcessAdmin):
    title = _("Relays")
    kind = "relay"
    noun = _("relay")
    actions = requests(RelayHeartbeat)
    list_display = ("process", "state", "times", "messages", "resources")
    fields: ClassVar[Any] = (
        *("process", "state", "started", "heartbeat", "last_pass", "published_count", "rate_now"),
        *("shards_tried", "memory", "round_trips"),
    )
    readonly_fields: ClassVar[Any] = fields

    def none_runs(self) -> str:
        if self.processes().filter(silent=False).exists():
            return ""
        ready = OutboxMessage.objects.using(self.using).filter(state=State.READY)
        return gettext("No relay is running. Messages that are ready: %(count)s.") % {"count": counted(ready)}

    def is_starting(self, row: Any) -> bool:
        return row.last_pass_at is None

    @admin.display(description=_("times"))
    def times(self, row: Any) -> SafeString:
        passed = age(row.last_pass_at, row.database_now)
        return stacked(super().times(row), format_html(gettext("last pass {}"), passed))

    @admin.display(description=_("messages"))
    def messages(self, row: Any) -> SafeString:
        return stacked(
            format_html(gettext("{} published"), self.published_count(row)),
            format_html(gettext("{} per second"), self.rate_now(row)),
            format_html(gettext("shards {}"), self.shards_tried(row)),
        )

    @admin.display(description=_("last successful pass"))
    def last_pass(self, row: Any) -> SafeString:
        return age(row.last_pass_at, row.database_now)

    @admin.display(description=_("published"))
    def published_count(self, row: Any) -> str:
        return f"{row.published:,}"

    @admin.display(description=_("shards"))
    def shards_tried(self, row: Any) -> str:
        """How many it tries to claim in one pass; relays that conflict share them."""
        return f"{row.shards} / {SHARDS}" if row.shards else NOTHING
