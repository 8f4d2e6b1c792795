"""Bulk operations in the admin: what, which messages, by whom, progress and outcome; and their cancellation."""

from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.acting import ActingAdmin
from exactly_once.console.admin.actions import Action
from exactly_once.console.admin.filters import AppFilter, ConditionFilter
from exactly_once.console.admin.html import Tone, age, app_name, badge, identifier, note, stacked, warning
from exactly_once.console.admin.pages import computed, instant, message_url, shown
from exactly_once.console.display import number, visible
from exactly_once.console.operators.changes import each
from exactly_once.half import half_of, halves, required, visible_halves
from exactly_once.models import Operation, OperationState
from exactly_once.upkeep.operation_rows import UNCHANGED_KEPT, Given, OperationTable

_MOST_FAILED_AGAIN = 20
_TONES = {
    OperationState.PLANNED: Tone.LATER,
    OperationState.RUNNING: Tone.OPEN,
    OperationState.STOPPED: Tone.STOPPED,
    OperationState.FINISHED: Tone.DONE,
    OperationState.CANCELLED: Tone.OVER,
}


class StateFilter(ConditionFilter):
    """By state."""

    title = _("state")
    parameter_name = "state"
    fixed: ClassVar[Any] = {state: (state.label, Q(state=state)) for state in OperationState if state in _TONES}


def _may_decide(user: Any, operation: Any) -> bool:
    """Users who may plan the action may cancel and continue it."""
    if operation is None:
        return any(half.permits(user, name) for half in halves() for name in half.actions)
    half = half_of(operation.app)
    return half is not None and half.permits(user, operation.action)


def _cancel(alias: str, pk: int, given: Given) -> bool:
    operation = Operation.objects.using(alias).get(pk=pk)
    return OperationTable(operation.app).cancel(alias, pk, by=given.user)


def _continue(alias: str, pk: int, given: Given) -> bool:
    """It is this user's now. A client of the HTTP API, or a command, needed something else."""
    operation = Operation.objects.using(alias).get(pk=pk)
    half = required(operation.app)
    permission = half.actions[operation.action].codename(half.messages)
    return OperationTable(operation.app).resume(alias, pk, by=given.user, permission=permission)


CANCEL = Action(
    name="cancel",
    label=_("Cancel the operation"),
    done=_("ends after its current batch"),
    may=_may_decide,
    perform=each(Operation, _cancel, _("it had ended already")),
    offered=lambda row: row.is_open and not row.cancelled_by,
)
CONTINUE = Action(
    name="continue",
    label=_("Continue with the messages that are left"),
    done=_("planned again, for the messages that are left"),
    may=_may_decide,
    perform=each(Operation, _continue, _("it is not stopped, or no message is left")),
    offered=lambda row: row.state == OperationState.STOPPED and row.parts.exists(),
)


@admin.register(Operation)
class OperationAdmin(ActingAdmin):
    """The operations of the apps whose messages the user may view, the latest first."""

    kind = "operation"
    noun = _("operation")
    nouns = _("operations")
    ordering = ("-id",)
    actions = (CANCEL, CONTINUE)
    nothing = _("No operation was planned yet. An action on all messages of a list or of a failure group becomes one.")
    list_display = ("state_badge", "what", "progress", "planned_by")
    list_display_links = ("what",)
    list_filter = (StateFilter, AppFilter)
    fieldsets = (
        (None, {"fields": ("state_explained", "progress", "failing_messages", "canary_text", "reasons_table")}),
        (_("Operation"), {"fields": ("action_label", "chosen", "parameters_text", "requested", "reason_text", "rate_text")}),
        (_("Times"), {"fields": ("planned_exactly", "started_exactly", "ended_exactly", "holder_name")}),
        (_("Unchanged messages"), {"fields": ("unchanged_table",)}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        apps = [half.app for half in visible_halves(request.user)]
        return super().get_queryset(request).filter(app__in=apps).exclude(state=OperationState.PREVIEWED)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return any(obj is None or half.app == obj.app for half in visible_halves(request.user))

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any) -> HttpResponse:
        """The page of an open operation refreshes itself."""
        context["refreshes"] = kwargs["obj"].is_open
        return super().render_change_form(request, context, *args, **kwargs)

    def badge_of(self, row: Any) -> SafeString:
        state = badge(row.get_state_display(), _TONES.get(row.state, Tone.OVER))
        return stacked(state, _("being cancelled")) if row.is_open and row.cancelled_by else state

    def explanation(self, row: Any) -> SafeString | str:
        if row.state == OperationState.STOPPED:
            return warning(_("It stopped by itself: %s.") % visible(row.stopped_because))
        if row.state == OperationState.CANCELLED:
            return note(_("Cancelled by %s.") % visible(row.cancelled_by))
        if row.state == OperationState.PLANNED and row.database_now - row.planned_at > timedelta(seconds=15):
            return warning(_("No process has begun it. Is a relay or a consumer running?"))
        return ""

    @admin.display(description=_("operation"))
    def what(self, row: Any) -> SafeString:
        return stacked(self.action_label(row), identifier(row.selection), app_name(row.app))

    @admin.display(description=_("action"))
    def action_label(self, row: Any) -> str:
        half = half_of(row.app)
        action = half and half.actions.get(row.action)
        label = str(action.label) if action else str(row.action)
        return _("%s, as a canary") % label if row.is_canary else label

    chosen = shown(_("messages"), "selection", identifier)

    parameters_text = computed(
        _("parameters"), lambda row: stacked(*(identifier(f"{name}: {value}") for name, value in row.given.items()))
    )

    @admin.display(description=_("progress"))
    def progress(self, row: Any) -> SafeString:
        rate = 0.0
        if row.is_open and row.started_at and row.processed and not row.is_canary:
            rate = row.processed / max((row.database_now - row.started_at).total_seconds(), 0.001)
        left = timedelta(seconds=(row.total - row.processed) / rate) if rate else None
        return render_to_string("exactly_once/progress.html", {"of": row, "rate": round(rate), "left": left})

    @admin.display(description=_("canary"))
    def canary_text(self, row: Any) -> str:
        if not row.is_canary:
            return ""
        text = _("waves so far: %(wave)s; succeeded since: %(succeeded)s, failed again: %(failed)s") % {
            "wave": row.wave,
            "succeeded": number(row.succeeded),
            "failed": number(row.failed_again),
        }
        if row.is_open and row.wave_rows:
            text += "; " + _("messages of the last wave that are awaited: %s") % number(len(row.wave_rows))
        return text

    @admin.display(description=_("failed again"))
    def failing_messages(self, row: Any) -> SafeString | str:
        """The messages that have stopped a canary."""
        url, words = partial(message_url, self.admin_site, row.app), _("message %s")
        shown = ((url(pk), words % pk, visible(failure)) for pk, failure in row.wave_rows[:_MOST_FAILED_AGAIN])
        lines = (format_html('<a href="{}">{}</a>: {}', *each) for each in shown)
        return stacked(*lines) if row.state == OperationState.STOPPED else ""

    @admin.display(description=_("unchanged, by reason"))
    def reasons_table(self, row: Any) -> SafeString:
        counted = sorted(row.reasons.items(), key=lambda item: -item[1])
        return stacked(*(format_html("{}: {}", number(count), visible(reason)) for reason, count in counted))

    @admin.display(description=_("messages"))
    def unchanged_table(self, row: Any) -> SafeString | str:
        more = row.refused + row.failed - len(row.unchanged)
        content = {"unchanged": row.unchanged, "kept": UNCHANGED_KEPT, "more": more}
        return render_to_string("exactly_once/unchanged.html", content) if row.unchanged else ""

    requested = shown(_("requested by"), "requested_by", identifier)
    reason_text = computed(_("reason"), lambda row: visible(row.reason))
    rate_text = computed(_("rate limit"), lambda row: _("%s messages per second") % row.rate if row.rate else "")
    holder_name = shown(_("executed by"), "holder", identifier)

    @admin.display(description=_("planned"))
    def planned_by(self, row: Any) -> SafeString:
        """In the list: when and by whom."""
        by_whom = format_html("{} {}", _("by"), identifier(row.requested_by))
        return stacked(age(row.planned_at, row.database_now, str(_("planned "))), by_whom)

    planned_exactly = instant(_("planned"), "planned_at")
    started_exactly = instant(_("started"), "started_at")
    ended_exactly = instant(_("ended"), "ended_at")
