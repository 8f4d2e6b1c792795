"""What runs now, as the processes said with their last heartbeats; and the runs under leases, which have rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from exactly_once.admin.filters import app_name
from exactly_once.admin.pages import PageAdmin, may_see_messages
from exactly_once.admin.sections import LeasedRun, sections
from exactly_once.display import NOTHING, Tone, age, badge, id_link, identifier
from exactly_once.models import Busy, Process
from exactly_once.operators.heartbeat_table import HeartbeatTable
from exactly_once.operators.minutes import database_time
from exactly_once.plurals import ngettext
from exactly_once.sql.connections import with_table

_MOST = 200


@admin.register(Busy)
class BusyAdmin(PageAdmin):
    """By process, those that run something first."""

    template = "exactly_once/busy.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        flow, (aliases, unavailable) = self.flow_url(request), with_table(Process)
        # A process has a row in each database that it works for; two aliases of one database have the same row.
        rows = {(row.pk, row.beat_at): row for alias in aliases for row in HeartbeatTable().rows(alias)[:_MOST]}
        seen = [row for row in rows.values() if may_see_messages(request, row.app)]
        named = {(run["what"], run["message"]) for row in seen for run in row.running}
        leased = {run: now for now, run in self._leased(request, aliases) if (run.handler, run.message) not in named}
        further = [(identifier(run.handler), id_link(flow, run.message), age(run.ends_at, now)) for run, now in leased.items()]
        return {
            "processes": [_process(row, flow) for row in sorted(seen, key=lambda row: not row.running)],
            "leased": further,
            "unavailable": ", ".join(unavailable),
            "most": _MOST,
        }

    def _leased(self, request: HttpRequest, aliases: Sequence[str]) -> Iterator[tuple[datetime, LeasedRun]]:
        for section in sections(request):
            for alias in aliases:
                now = database_time(alias)
                yield from ((now, run) for run in section.leased(alias, _MOST))


def _process(row: Any, flow: str) -> dict[str, Any]:
    return {
        "name": identifier(f"{row.host}:{row.pid}"),
        "app": app_name(row.app),
        "silent": badge(_("Silent"), Tone.STOPPED) if row.silent else "",
        "reported": age(row.beat_at, row.database_now),
        "runs": [
            {
                "what": identifier(run["what"]) if run["what"] else _("Relay pass"),
                "message": _message(run, flow),
                "thread": identifier(run["thread"]),
                "since": age(row.started_at + timedelta(seconds=run["began"]), row.database_now),
            }
            for run in row.running
        ],
    }


def _message(run: dict[str, Any], flow: str) -> SafeString:
    if not run["message"]:
        return format_html("{}", NOTHING)
    more = run["messages"] - 1
    words = ngettext("and %(count)s more", "and %(count)s more", more) if more else ""
    return format_html("{} {}", id_link(flow, run["message"]), words)
