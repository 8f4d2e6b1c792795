"""Running processes in the admin, by their heartbeats; see `kernel.heartbeat`."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from outbox.console.acting_admin import ReadOnlyAdmin
from outbox.console.display import Tone, age, badge, duration, identifier, stacked, visible
from outbox.console.pages import Page
from outbox.database.heartbeat_table import HeartbeatTable
from outbox.kernel.heartbeat import SILENT_AFTER


class ProcessAdmin(ReadOnlyAdmin):
    """One row per running process, with the content of its last heartbeat."""

    title: ClassVar[Any] = ""
    noun: ClassVar[Any] = _("process")
    change_list_template: ClassVar[Any] = Page("processes.html")
    sortable_by = ()
    actions = None
    show_full_result_count = False

    def none_runs(self) -> str:
        """The work that no process does, and the consequence; "" if there is none."""
        raise NotImplementedError

    def is_starting(self, row: Any) -> bool:
        """Has the process not yet done any work?"""
        return False

    def processes(self) -> QuerySet[Any]:
        return HeartbeatTable(self.model).rows(self.using)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return self.processes()

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        context = {
            "title": self.title,
            "noun": self.noun,
            "silent_after": duration(SILENT_AFTER),
            "none_runs": self.none_runs(),
        }
        return super().changelist_view(request, {**context, **(extra_context or {})})

    @admin.display(description=_("process, version"))
    def process(self, row: Any) -> SafeString:
        return stacked(identifier(f"{row.host}:{row.pid}"), identifier(row.version))

    @admin.display(description=_("state"))
    def state(self, row: Any) -> SafeString:
        if row.silent:
            return stacked(
                badge(gettext("Silent"), Tone.STOPPED), format_html(gettext("for {}"), duration(row.database_now - row.beat_at))
            )
        if row.waits_for:
            return stacked(badge(gettext("Waiting"), Tone.FAILING), format_html(gettext("for {}"), visible(row.waits_for)))
        return badge(gettext("Starting"), Tone.LATER) if self.is_starting(row) else badge(gettext("Working"), Tone.DONE)

    @admin.display(description=_("started"))
    def started(self, row: Any) -> SafeString:
        return age(row.started_at, row.database_now)

    @admin.display(description=_("last heartbeat"))
    def heartbeat(self, row: Any) -> SafeString:
        return age(row.beat_at, row.database_now)
