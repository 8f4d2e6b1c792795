"""The schedules in the admin: when each ticks, why one fails, and the operators' decisions."""

from functools import partial
from typing import Any

from django.contrib import admin
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.acting import ActingAdmin
from exactly_once.console.admin.actions import Action, ReasonForm
from exactly_once.console.admin.html import Tone, badge, headline, identifier, text
from exactly_once.console.admin.pages import instant, shown
from exactly_once.console.operators.changes import each
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.minutes import database_time
from exactly_once.upkeep.operation_rows import Given
from outbox.contrib.recurring.declarations import declarations
from outbox.contrib.recurring.models import Schedule

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
    list_display = ("state_badge", "name", "recurrence_name", "last", "next", "why")
    list_display_links = ("name",)
    fields = ("state_badge", "name", "recurrence_name", "last", "next", "error_text")

    def badge_of(self, row: Any) -> SafeString:
        if row.name not in declarations:
            return badge(gettext("Not declared"), Tone.STOPPED)
        if row.paused_at:
            return badge(gettext("Paused"), Tone.LATER)
        return badge(gettext("Failing"), Tone.FAILING) if row.error else badge(gettext("Active"), Tone.DONE)

    recurrence_name = shown(_("schedule"), "recurrence", identifier)
    last = instant(_("last tick or beginning"), "position")
    next = instant(_("next tick or attempt"), "due_at")
    why = shown(_("why"), "error", headline)
    error_text = shown(_("why"), "error", text)
