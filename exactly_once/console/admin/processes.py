"""Running processes in the admin, by their heartbeats, and the operator's requests to them; see `upkeep.heartbeat_table`.

And what they run now, as they said with these heartbeats; and the runs under leases, which have rows.
"""

from datetime import timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import format_lazy
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.acting import ActingAdmin
from exactly_once.console.admin.actions import Action
from exactly_once.console.admin.filters import AppFilter
from exactly_once.console.admin.html import NOTHING, Tone, age, badge, identifier, stacked, warning
from exactly_once.console.admin.pages import PageAdmin, computed
from exactly_once.console.display import bytes_text, duration, number, visible
from exactly_once.console.operators.changes import each
from exactly_once.half import Half, halves, visible_halves
from exactly_once.models import Busy, Process
from exactly_once.process.loop import ALLOWED_IN, Mode, Request
from exactly_once.sql.connections import with_table
from exactly_once.upkeep.heartbeat_table import SILENT_AFTER, HeartbeatTable, is_ahead, long_runs
from exactly_once.upkeep.minutes import database_time

_PROCESSES = HeartbeatTable()
_HANDLERS_IN_THE_LIST = 3
_MOST_BUSY = 200
_LONG_RUN = timedelta(minutes=5)
_MODES: dict[str, Any] = {
    Mode.PAUSED: (_("Paused"), Tone.LATER),
    Mode.DRAINING: (_("Draining"), Tone.LATER),
    Mode.STOPPING: (_("Stopping"), Tone.LATER),
}


def _action(asked: Request, label: Any, done: Any, question: Any = "", button: Any = "") -> Action:
    return Action(
        name=asked,
        label=label,
        done=done,
        perform=each(
            Process,
            lambda alias, pk, given: _PROCESSES.request(alias, pk, asked, given.who),
            _("it has stopped, or the request has no effect in its state"),
        ),
        offered=lambda row: row.stopped_at is None and row.mode in ALLOWED_IN[asked],
        question=question,
        button=button,
    )


def _of(process: Any) -> list[Half]:
    """The half that it works for; none if that is no longer installed."""
    return [half for half in halves() if half.app == process.app]


def _work(row: Any, most: int | None = None) -> SafeString:
    # The present rate of a silent process is unknown.
    rate = NOTHING if row.silent or row.has_stopped else number(row.rate, 1)
    handlers = row.facts.get("handlers", [])
    more = len(handlers[most:]) if most else 0
    return stacked(
        *(count for half in _of(row) for count in half.counts(row)),
        format_html(gettext("{} per second"), rate),
        *map(identifier, handlers[:most]),
        *([format_html(gettext("and {} more"), more)] if more else []),
    )


@admin.register(Process)
class ProcessAdmin(ActingAdmin):
    """One row per process, with the content of its last heartbeat. Each request to a process has its own permission."""

    kind = "process"
    noun = _("process")
    nouns = _("processes")
    nothing = _("No process has run yet. Each relay and each consumer stands here as soon as it runs.")
    hint = format_lazy(
        _(
            "A process writes its row every few seconds. One that has not for {silent} is shown as silent: it was killed, is "
            "frozen, or cannot reach the database. The others continue with its messages. A request waits in the row until the "
            "process reads it with its next heartbeat. The row of a stopped process is shown for an hour, that of a silent one "
            "for a day."
        ),
        silent=duration(SILENT_AFTER),
    )
    list_filter = (AppFilter,)
    list_display = ("process", "state", "times", "work", "resources")
    fields: ClassVar[Any] = ("process", "state", "times", "all_work", "resources")
    actions = (
        _action(
            Request.PAUSE,
            _("Pause"),
            _("asked to pause"),
            _("Pause these processes? They finish what is in hand and begin nothing until they are resumed."),
            _("Pause the processes"),
        ),
        _action(Request.RESUME, _("Resume"), _("asked to resume")),
        _action(
            Request.DRAIN,
            _("Drain"),
            _("asked to drain"),
            _("Drain these processes? They finish everything that is due and then end. A supervisor may start them again."),
            _("Drain the processes"),
        ),
        _action(
            Request.STOP,
            _("Stop"),
            _("asked to stop"),
            _("Stop these processes? They finish what is in hand and end. A supervisor may start them again."),
            _("Stop the processes"),
        ),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return _PROCESSES.known(self.using)

    def warnings(self, request: HttpRequest) -> list[SafeString]:
        missing = [half.missing(self.using) for half in halves()]
        return [warning(words) for words in missing if words]

    def badge_of(self, row: Any) -> SafeString:
        if row.has_stopped:
            return badge(gettext("Stopped"), Tone.OVER)
        if row.silent:
            return badge(gettext("Silent"), Tone.STOPPED)
        if row.mode in _MODES:
            return badge(*_MODES[row.mode])
        if row.waits:
            return badge(gettext("Waiting"), Tone.FAILING)
        if any(half.is_starting(row) for half in _of(row)):
            return badge(gettext("Starting"), Tone.LATER)
        has_long = long_runs(row, _LONG_RUN)
        return badge(gettext("Long run"), Tone.FAILING) if has_long else badge(gettext("Working"), Tone.DONE)

    def remark(self, action: Action, row: Any) -> SafeString | str:
        words = super().remark(action, row)
        if words or not row.silent:
            return words
        return gettext("It is silent: the request waits until it sends a heartbeat again. Stop and Drain also end its alert.")

    @admin.display(description=_("process, version"))
    def process(self, row: Any) -> SafeString:
        return stacked(identifier(f"{row.host}:{row.pid}"), *(half.kind_label for half in _of(row)), identifier(row.version))

    @admin.display(description=_("state"))
    def state(self, row: Any) -> SafeString:
        lines: list[str] = [self.badge_of(row)]
        if row.stopped_at:
            return stacked(*lines, age(row.stopped_at, row.database_now))
        if row.has_stopped:
            words = gettext("killed {}, because it did not end in time")
            return stacked(*lines, format_html(words, age(row.beat_at, row.database_now)))
        if row.silent and is_ahead(row):
            lines.append(gettext("its last heartbeat is ahead of the database's clock"))
        elif row.silent:
            lines.append(format_html(gettext("for {}"), duration(row.database_now - row.beat_at)))
        elif row.mode not in _MODES:
            lines += [format_html(gettext("for {}"), visible(what)) for what in row.waits]
        if row.requested:
            lines.append(self._request_of(row))
        for name, lasted in long_runs(row, _LONG_RUN).items():
            words = ngettext("{name} for {time}", "{name} for {time}, in {count} threads", len(lasted))
            lines.append(format_html(words, name=identifier(name), time=duration(lasted[0]), count=len(lasted)))
        return stacked(*lines)

    def _request_of(self, row: Any) -> SafeString:
        is_read, unread = row.acknowledged_at, gettext("{} is requested {} by {}, not yet read")
        words = gettext("{} was requested {} by {}") if is_read else unread
        return format_html(words, row.requested, age(row.requested_at, row.database_now), visible(row.requested_by))

    @admin.display(description=_("times"))
    def times(self, row: Any) -> SafeString:
        lines = [
            format_html(gettext("started {}"), age(row.started_at, row.database_now)),
            format_html(gettext("heartbeat {}"), age(row.beat_at, row.database_now)),
        ]
        if row.last_pass_at:
            lines.append(format_html(gettext("last pass {}"), age(row.last_pass_at, row.database_now)))
        return stacked(*lines)

    work = computed(_("work"), lambda row: _work(row, most=_HANDLERS_IN_THE_LIST))
    all_work = computed(_("work"), _work)

    @admin.display(description=_("memory, round trips"))
    def resources(self, row: Any) -> SafeString:
        return stacked(
            format_html(gettext("memory {}"), bytes_text(row.memory_bytes)),
            format_html(gettext("database {}"), _milliseconds(row.database_ms)),
            format_html(gettext("broker {}"), _milliseconds(row.broker_ms)),
        )


def _milliseconds(value: float | None) -> str:
    return str(_("unknown")) if value is None else f"{number(value, 1)} ms"


@admin.register(Busy)
class BusyAdmin(PageAdmin):
    """By process, those that run something first."""

    template = "exactly_once/busy.html"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        aliases, unavailable = with_table(Process)
        # A process has a row in each database that it works for; two aliases of one database have the same row.
        rows = {(row.pk, row.beat_at): row for alias in aliases for row in HeartbeatTable().rows(alias)[:_MOST_BUSY]}
        seen = [row for row in rows.values() if any(half.is_visible(request.user) for half in _of(row))]
        for process in seen:
            for run in process.running:
                run.update(since=process.started_at + timedelta(seconds=run["began"]), more=run["messages"] - 1)
        named = {(run["what"], run["message"]) for row in seen for run in row.running}
        leased = {
            run: database_time(alias)
            for half in visible_halves(request.user)
            for alias in aliases
            for run in half.section.leased(alias, _MOST_BUSY)
            if run[:2] not in named
        }
        return {
            "flow": self.flow_url(request),
            "processes": sorted(seen, key=lambda row: not row.running),
            "leased": leased.items(),
            "silent": badge(gettext("Silent"), Tone.STOPPED),
            "unavailable": ", ".join(unavailable),
            "most": _MOST_BUSY,
        }
