"""The schedules in the admin: when each ticks, why one fails, and the operators' decisions."""

from functools import partial
from typing import Any

from django.contrib import admin
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.acting import ActingAdmin
from exactly_once.console.admin.actions import Action, ReasonForm
from exactly_once.console.admin.html import NOTHING, Tone, badge, headline, identifier, labelled, moment, stacked, text
from exactly_once.console.admin.pages import computed, instant, shown
from exactly_once.console.display import number
from exactly_once.console.operators.changes import each
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.minutes import database_time
from exactly_once.upkeep.operation_rows import Given
from outbox.contrib.recurring.declarations import declarations
from outbox.contrib.recurring.models import Schedule

_LAST, _NEXT = _("last tick or beginning"), _("next tick or attempt")
_BEGIN_NOW = {"paused_at": None, "position": DatabaseTime(), "due_at": DatabaseTime(), "failures": 0, "error": ""}


def _rows(alias: str, pk: Any) -> Any:
    return Schedule.objects.using(alias).filter(pk=pk)


def _run(alias: str, pk: Any, given: Given) -> bool:
    declared = declarations.get(_rows(alias, pk).values_list("name", flat=True).get())
    if declared is not None:
        declared.publish(database_time(alias), alias)
    return declared is not None


_action = partial(Action, form=ReasonForm)
PAUSE = _action(
    name="pause",
    label=_("Pause"),
    done=_("paused"),
    perform=each(Schedule, lambda alias, pk, given: _rows(alias, pk).update(paused_at=DatabaseTime())),
    offered=lambda row: row.paused_at is None,
    question=_("Pause these schedules? The ticks of the pause are not published later."),
)
RESUME = _action(
    name="resume",
    permission="pause",
    label=_("Resume from now on"),
    done=_("resumed"),
    perform=each(Schedule, lambda alias, pk, given: _rows(alias, pk).update(**_BEGIN_NOW)),
    question=_("Resume these schedules with their next tick? What they have missed is not published."),
)
RUN = _action(
    name="run",
    label=_("Run now"),
    done=_("run"),
    perform=each(Schedule, _run, _("this process does not declare it")),
    offered=lambda row: row.name in declarations,
    question=_("Run these schedules now? Their ticks do not change, and a pause continues."),
)


@admin.register(Schedule)
class ScheduleAdmin(ActingAdmin):
    """By name. The code declares them, and a relay adds them."""

    kind = "schedule"
    noun = _("schedule")
    nouns = _("schedules")
    nothing = _("No relay has seen a schedule.")
    hint = _("Relays publish the messages of these schedules. One that fails is tried again, and delays no other.")
    refusals = (Exception,)  # that of a function is the answer to "run now"
    actions = (PAUSE, RESUME, RUN)
    named_by = "name"
    ordering = ("name",)
    list_display = ("state_badge", "name_and_recurrence", "last", "next", "error_line")
    list_display_links = ("name_and_recurrence",)
    fields = ("state_badge", "name", "recurrence_name", "last", "next", "paused", "failed_attempts", "error_text")

    def badge_of(self, row: Any) -> SafeString:
        if row.name not in declarations:
            return badge(gettext("Not declared"), Tone.STOPPED)
        if row.paused_at:
            return badge(gettext("Paused"), Tone.LATER)
        return badge(gettext("Failing"), Tone.FAILING) if row.error else badge(gettext("Active"), Tone.DONE)

    name_and_recurrence = computed(
        _("name, schedule"), lambda row: stacked(identifier(row.name), identifier(row.recurrence) if row.recurrence else "")
    )
    recurrence_name = shown(_("schedule"), "recurrence", identifier)
    last = instant(_LAST, "position", lambda at, now: labelled(_LAST, moment(at, now)))
    next = computed(_NEXT, lambda row: labelled(_NEXT, NOTHING if row.paused_at else moment(row.due_at, row.database_now)))
    paused = instant(_("paused"), "paused_at")
    failed_attempts = shown(_("failed attempts"), "failures", lambda failures: number(failures) if failures else NOTHING)
    error_line = shown(_("last error"), "error", headline)
    error_text = shown(_("last error"), "error", text)
