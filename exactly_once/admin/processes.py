"""Running processes in the admin, by their heartbeats, and the operator's requests to them; see `process.heartbeat`."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.defaultfilters import filesizeformat
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import format_lazy
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.admin.acting import ActingAdmin
from exactly_once.display import NOTHING, Tone, age, badge, duration, identifier, stacked, visible, warning
from exactly_once.operators.actions import Action
from exactly_once.operators.heartbeat_table import HeartbeatTable
from exactly_once.process.heartbeat import SILENT_AFTER
from exactly_once.process.requests import ALLOWED_IN, Mode, Request

_MODES: dict[str, Any] = {
    Mode.PAUSED: (_("Paused"), Tone.STOPPED),
    Mode.DRAINING: (_("Draining"), Tone.LATER),
    Mode.STOPPING: (_("Stopping"), Tone.LATER),
}


def requests(model: Any) -> tuple[Action, ...]:
    """The actions on the processes with these heartbeats."""

    def action(asked: Request, label: Any, done: Any, question: Any = "", button: Any = "") -> Action:
        return Action(
            name=asked,
            label=label,
            done=done,
            run=lambda alias, pk, given: HeartbeatTable(model).request(alias, pk, asked, given.who),
            offered=lambda row: row.stopped_at is None and row.mode in ALLOWED_IN[asked],
            why_not=lambda row, given: gettext("it has stopped, or the request has no effect in its state"),
            question=question,
            button=button,
        )

    return (
        action(
            Request.PAUSE,
            _("Pause"),
            _("asked to pause"),
            _("Pause these processes? They finish what is in hand and begin nothing until they are resumed."),
            _("Pause the processes"),
        ),
        action(Request.RESUME, _("Resume"), _("asked to resume")),
        action(
            Request.DRAIN,
            _("Drain"),
            _("asked to drain"),
            _("Drain these processes? They finish everything that is due and then end. A supervisor may start them again."),
            _("Drain the processes"),
        ),
        action(
            Request.STOP,
            _("Stop"),
            _("asked to stop"),
            _("Stop these processes? They finish what is in hand and end. A supervisor may start them again."),
            _("Stop the processes"),
        ),
    )


class ProcessAdmin(ActingAdmin):
    """One row per process, with the content of its last heartbeat. Each request to a process has its own permission."""

    title: ClassVar[Any] = ""
    kind = "process"
    noun = _("process")
    nothing = _("No process is known.")
    hint = format_lazy(
        _(
            "A process writes its row every few seconds. One that has not for {silent} is shown as silent: it was killed, is "
            "frozen, or cannot reach the database. The others continue with its messages. A request waits in the row until the "
            "process reads it with its next heartbeat. The row of a stopped process is shown for an hour, that of a silent one "
            "for a day."
        ),
        silent=duration(SILENT_AFTER),
    )
    sortable_by = ()
    list_filter = ()

    def none_runs(self) -> str:
        """The work that no process does, and the consequence; "" if there is none."""
        raise NotImplementedError

    def is_starting(self, row: Any) -> bool:
        """Has the process not yet done any work?"""
        return False

    def processes(self) -> QuerySet[Any]:
        """Every process that has not stopped, silent ones last."""
        return HeartbeatTable(self.model).rows(self.using)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return HeartbeatTable(self.model).known(self.using)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        return super().changelist_view(request, {"title": self.title, **(extra_context or {})})

    def warnings(self, request: HttpRequest) -> list[SafeString]:
        none_runs = self.none_runs()
        return [warning(none_runs)] if none_runs else []

    def subject(self, row: Any) -> str:
        return visible(f"{row.host}:{row.pid}")

    def badge_of(self, row: Any) -> SafeString:
        if row.stopped_at:
            return badge(gettext("Stopped"), Tone.OVER)
        if row.silent:
            return badge(gettext("Silent"), Tone.STOPPED)
        if row.mode in _MODES:
            return badge(*_MODES[row.mode])
        if row.waits_for:
            return badge(gettext("Waiting"), Tone.FAILING)
        return badge(gettext("Starting"), Tone.LATER) if self.is_starting(row) else badge(gettext("Working"), Tone.DONE)

    def remark(self, action: Action, row: Any) -> SafeString | str:
        words = super().remark(action, row)
        if words or not row.silent:
            return words
        return gettext("It is silent: the request waits until it sends a heartbeat again.")

    @admin.display(description=_("process, version"))
    def process(self, row: Any) -> SafeString:
        return stacked(identifier(f"{row.host}:{row.pid}"), identifier(row.version))

    @admin.display(description=_("state"))
    def state(self, row: Any) -> SafeString:
        lines = [self.badge_of(row)]
        if row.stopped_at:
            return stacked(*lines, age(row.stopped_at, row.database_now))
        if row.silent:
            lines.append(format_html(gettext("for {}"), duration(row.database_now - row.beat_at)))
        elif row.waits_for and row.mode not in _MODES:
            lines.append(format_html(gettext("for {}"), visible(row.waits_for)))
        if row.requested:
            lines.append(self._request_of(row))
        return stacked(*lines)

    def _request_of(self, row: Any) -> SafeString:
        words = (
            gettext("{} was requested {} by {}") if row.acknowledged_at else gettext("{} is requested {} by {}, not yet read")
        )
        return format_html(words, row.requested, age(row.requested_at, row.database_now), visible(row.requested_by))

    @admin.display(description=_("times"))
    def times(self, row: Any) -> SafeString:
        return stacked(
            format_html(gettext("started {}"), age(row.started_at, row.database_now)),
            format_html(gettext("heartbeat {}"), age(row.beat_at, row.database_now)),
        )

    @admin.display(description=_("started"))
    def started(self, row: Any) -> SafeString:
        return age(row.started_at, row.database_now)

    @admin.display(description=_("last heartbeat"))
    def heartbeat(self, row: Any) -> SafeString:
        return age(row.beat_at, row.database_now)

    @admin.display(description=_("per second"))
    def rate_now(self, row: Any) -> str:
        # The present rate of a silent process is unknown.
        return NOTHING if row.silent or row.stopped_at else f"{row.rate:,.1f}"

    @admin.display(description=_("memory"))
    def memory(self, row: Any) -> str:
        return gettext("unknown") if row.memory_bytes is None else filesizeformat(row.memory_bytes)

    @admin.display(description=_("round trips"))
    def round_trips(self, row: Any) -> SafeString:
        return stacked(
            format_html(gettext("database {}"), _milliseconds(row.database_ms)),
            format_html(gettext("broker {}"), _milliseconds(row.broker_ms)),
        )

    @admin.display(description=_("memory, round trips"))
    def resources(self, row: Any) -> SafeString:
        return stacked(format_html(gettext("memory {}"), self.memory(row)), self.round_trips(row))


def _milliseconds(value: float | None) -> str:
    return str(_("unknown")) if value is None else f"{value:,.1f} ms"
