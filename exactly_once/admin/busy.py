"""What runs now, as the processes said with their last heartbeats; and the runs under leases, which have rows."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.translation import gettext as _

from exactly_once.admin.pages import PageAdmin, may_see_messages
from exactly_once.admin.sections import sections
from exactly_once.display import Tone, badge
from exactly_once.models import Busy, Process
from exactly_once.operators.heartbeat_table import HeartbeatTable
from exactly_once.operators.minutes import database_time
from exactly_once.sql.connections import with_table

_MOST = 200


@admin.register(Busy)
class BusyAdmin(PageAdmin):
    """By process, those that run something first."""

    template = "exactly_once/busy.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        aliases, unavailable = with_table(Process)
        # A process has a row in each database that it works for; two aliases of one database have the same row.
        rows = {(row.pk, row.beat_at): row for alias in aliases for row in HeartbeatTable().rows(alias)[:_MOST]}
        seen = [row for row in rows.values() if may_see_messages(request, row.app)]
        for process in seen:
            for run in process.running:
                run.update(since=process.started_at + timedelta(seconds=run["began"]), more=run["messages"] - 1)
        named = {(run["what"], run["message"]) for row in seen for run in row.running}
        leased = {
            run: database_time(alias)
            for section in sections(request)
            for alias in aliases
            for run in section.leased(alias, _MOST)
            if (run.handler, run.message) not in named
        }
        return {
            "flow": self.flow_url(request),
            "processes": sorted(seen, key=lambda row: not row.running),
            "leased": leased.items(),
            "silent": badge(_("Silent"), Tone.STOPPED),
            "unavailable": ", ".join(unavailable),
            "most": _MOST,
        }
