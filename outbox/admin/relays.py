"""Which relays run, what each does, and what it waits for."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from outbox import store
from outbox.kernel.acting_admin import ReadOnlyAdmin, counted
from outbox.kernel.display import NOTHING, Tone, age, badge, identifier, span, stacked, visible
from outbox.models import OutboxMessage, RelayHeartbeat, State


@admin.register(RelayHeartbeat)
class RelayAdmin(ReadOnlyAdmin):
    """One row per running relay, as it last said of itself."""

    change_list_template = "outbox/admin/relays.html"
    list_display = ("process", "state", "started", "heartbeat", "last_pass", "published_count", "rate_now")
    fields: ClassVar[Any] = list_display
    readonly_fields: ClassVar[Any] = list_display
    sortable_by = ()
    actions = None
    show_full_result_count = False

    class Media:
        css: ClassVar[Any] = {"all": ["outbox/admin.css"]}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return store.relays(self.using)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        context = {"title": "Relays", "silent_after": span(store.SILENT_AFTER), "none_runs": self._none_runs()}
        return super().changelist_view(request, {**context, **(extra_context or {})})

    def _none_runs(self) -> str:
        """That no relay runs, and what follows; "" when one does."""
        if store.relays(self.using).filter(silent=False).exists():
            return ""
        ready = OutboxMessage.objects.using(self.using).filter(state=State.READY)
        return f"No relay is running. Messages that are ready: {counted(ready)}."

    @admin.display(description="process, version")
    def process(self, row: Any) -> SafeString:
        return stacked(identifier(f"{row.host}:{row.pid}"), identifier(row.version))

    @admin.display(description="state")
    def state(self, row: Any) -> SafeString:
        if row.silent:
            return stacked(badge("Silent", Tone.STOPPED), format_html("for {}", span(row.database_now - row.beat_at)))
        if row.waits_for:
            return stacked(badge("Waiting", Tone.FAILING), format_html("for {}", visible(row.waits_for)))
        return badge("Starting", Tone.LATER) if row.last_pass_at is None else badge("Working", Tone.DONE)

    @admin.display(description="started")
    def started(self, row: Any) -> SafeString:
        return age(row.started_at, row.database_now)

    @admin.display(description="last heartbeat")
    def heartbeat(self, row: Any) -> SafeString:
        return age(row.beat_at, row.database_now)

    @admin.display(description="last successful pass")
    def last_pass(self, row: Any) -> SafeString:
        return age(row.last_pass_at, row.database_now)

    @admin.display(description="published")
    def published_count(self, row: Any) -> str:
        return f"{row.published:,}"

    @admin.display(description="per second")
    def rate_now(self, row: Any) -> str:
        # What a silent relay does now is not known.
        return NOTHING if row.silent else f"{row.rate:,.1f}"
