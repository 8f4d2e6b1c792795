"""Admin page: the processes that run handlers on this database, their handlers, and what each waits for."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.admin.processes import ProcessAdmin, requests
from exactly_once.display import NOTHING, identifier, stacked
from inbox.consumer.heartbeat import unattended, what_to_start
from inbox.models import ConsumerHeartbeat

_HANDLERS_IN_THE_LIST = 3


@admin.register(ConsumerHeartbeat)
class ConsumerAdmin(ProcessAdmin):
    title = _("Consumers")
    actions = requests(ConsumerHeartbeat)
    list_display = ("process", "state", "times", "some_handlers", "counts", "resources")
    fields: ClassVar[Any] = (
        *("process", "state", "started", "heartbeat", "all_handlers", "received_count", "ran_count"),
        *("rate_now", "memory", "round_trips"),
    )
    readonly_fields: ClassVar[Any] = fields

    def none_runs(self) -> str:
        names = unattended(self.using)
        if not names:
            return ""
        return gettext("No consumer is running for: %(names)s. %(remedy)s") % {
            "names": ", ".join(names),
            "remedy": what_to_start(),
        }

    @admin.display(description=_("handlers"))
    def some_handlers(self, row: Any) -> SafeString:
        names, more = row.handlers[:_HANDLERS_IN_THE_LIST], len(row.handlers) - _HANDLERS_IN_THE_LIST
        lines = [identifier(name) for name in names] or [format_html("{}", NOTHING)]
        return stacked(*lines, *([format_html(gettext("and {} more"), more)] if more > 0 else []))

    @admin.display(description=_("handlers"))
    def all_handlers(self, row: Any) -> SafeString:
        return stacked(*map(identifier, row.handlers)) if row.handlers else format_html("{}", NOTHING)

    @admin.display(description=_("messages"))
    def counts(self, row: Any) -> SafeString:
        received = format_html(gettext("{} deliveries"), self.received_count(row))
        ran = format_html(gettext("{} stored run"), self.ran_count(row))
        return stacked(received, ran, format_html(gettext("{} per second"), self.rate_now(row)))

    @admin.display(description=_("deliveries"))
    def received_count(self, row: Any) -> str:
        return f"{row.received:,}"

    @admin.display(description=_("stored messages run"))
    def ran_count(self, row: Any) -> str:
        return f"{row.ran:,}"
