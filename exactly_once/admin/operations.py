"""Bulk operations in the admin: what, which messages, by whom, progress and outcome; and their cancellation."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.decorators import method_decorator
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_POST

from exactly_once.admin.acting import ActingAdmin
from exactly_once.admin.by_app import AppFilter, app_name
from exactly_once.admin.pages import message_url
from exactly_once.admin.sections import Text
from exactly_once.display import NOTHING, Tone, age, badge, duration, identifier, moment, note, stacked, visible, warning
from exactly_once.models import Operation, OperationState
from exactly_once.operators.actions import operated
from exactly_once.operators.audit import Subject, actor_of, record
from exactly_once.operators.operation_rows import UNCHANGED_KEPT, OperationTable
from exactly_once.sql.now import DatabaseTime

_MOST_FAILED_AGAIN = 20
_TONES = {
    OperationState.PLANNED: Tone.LATER,
    OperationState.RUNNING: Tone.OPEN,
    OperationState.STOPPED: Tone.STOPPED,
    OperationState.FINISHED: Tone.DONE,
    OperationState.CANCELLED: Tone.OVER,
}


class StateFilter(admin.SimpleListFilter):
    """By state."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return OperationState.choices

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(state=self.value()) if self.value() in OperationState else queryset


@admin.register(Operation)
class OperationAdmin(ActingAdmin):
    """The operations of the apps whose messages the user may view, the latest first."""

    change_form_template = "exactly_once/operation.html"
    ordering = ("-id",)
    sortable_by = ()
    actions = None
    nothing = _("No operation was planned yet. An action on all messages of a list or of a failure group becomes one.")
    list_display = ("state_badge", "what", "progress", "planned_by")
    list_display_links = ("what",)
    list_filter = (StateFilter, AppFilter)
    readonly_fields: ClassVar[Any] = (
        "state_explained",
        "progress",
        "action_label",
        "selection_text",
        "parameters",
        "requested",
        "reason_text",
        "rate_text",
        "failing_messages",
        "canary_text",
        "reasons_table",
        "unchanged_table",
        "planned_exactly",
        "started_exactly",
        "ended_exactly",
        "holder_name",
    )

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Only with the parts that this operation has."""
        is_stopped = obj.state == OperationState.STOPPED
        shown = {
            "failing_messages": is_stopped and obj.wave_rows,
            "canary_text": obj.is_canary,
            "reasons_table": obj.reasons,
        }
        outcome = [name for name, is_shown in shown.items() if is_shown]
        what = ["action_label", "selection_text", *(["parameters"] if obj.given else []), "requested"]
        what += [name for name, is_shown in (("reason_text", obj.reason), ("rate_text", obj.rate)) if is_shown]
        times = [
            "planned_exactly",
            *(["started_exactly"] if obj.started_at else []),
            *(["ended_exactly"] if obj.ended_at else []),
        ]
        return [
            (None, {"fields": ["state_explained", "progress", *outcome]}),
            (_("Operation"), {"fields": what}),
            (_("Times"), {"fields": [*times, *(["holder_name"] if obj.holder else [])]}),
            *([(_("Unchanged messages"), {"fields": ["unchanged_table"]})] if obj.unchanged else []),
        ]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows: QuerySet[Any] = Operation.objects.using(self.using).filter(app__in=_visible_apps(request))
        annotated: QuerySet[Any] = rows.annotate(database_now=DatabaseTime())
        return annotated

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        visible_apps = _visible_apps(request)
        return bool(visible_apps) if obj is None else obj.app in visible_apps

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def may_cancel(self, request: HttpRequest, operation: Any) -> bool:
        """Users who may plan the action may cancel it."""
        of = operated.get(operation.app)
        return of is not None and of.permits(request.user, operation.action)

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view
        return [
            path("<int:pk>/cancel/", view(self.cancel_view), name="exactly_once_operation_cancel"),
            path("<int:pk>/continue/", view(self.continue_view), name="exactly_once_operation_continue"),
            *super().get_urls(),
        ]

    @method_decorator(require_POST)
    def cancel_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Ask for the end of an operation."""
        done = _("The operation ends after its current batch.")
        return self._decide(request, pk, "cancel", done, _("The operation had ended already."))

    @method_decorator(require_POST)
    def continue_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Continue an operation that has stopped."""
        done = _("The operation is planned again, for the messages that are left.")
        return self._decide(request, pk, "resume", done, _("The operation is not stopped, or no message is left."))

    def _decide(self, request: HttpRequest, pk: int, decision: str, done: Text, too_late: Text) -> HttpResponse:
        operation = self.get_queryset(request).filter(pk=pk).first()
        if operation is None:
            raise Http404
        if not self.may_cancel(request, operation):
            raise PermissionDenied
        user: Any = request.user
        given = {"by": user.get_username()}
        if decision == "resume":
            # It is this user's now. A client of the HTTP API, or a command, needed something else.
            of = operated[operation.app]
            given["permission"] = of.actions[operation.action].codename(of.model)
        with transaction.atomic(using=self.using):
            is_done = getattr(OperationTable(operation.app), decision)(self.using, pk, **given)
            if is_done:
                self.log_change(request, operation, str(done))
                subject = Subject(kind="operation", id=str(pk), name=str(operation))
                record(operation.app, self.using, actor_of(request), f"{decision}_operation", [subject])
        messages.add_message(request, messages.SUCCESS if is_done else messages.WARNING, str(done if is_done else too_late))
        return HttpResponseRedirect(self._url("change", pk))

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any) -> HttpResponse:
        operation: Any = kwargs.get("obj")
        if operation is not None:
            context["refreshes"] = operation.is_open
            may = self.may_cancel(request, operation)
            if may and operation.is_open and not operation.cancelled_by:
                context["cancel_url"] = self._url("cancel", operation.pk)
            if may and operation.state == OperationState.STOPPED and operation.parts.exists():
                context["continue_url"] = self._url("continue", operation.pk)
        return super().render_change_form(request, context, *args, **kwargs)

    def _url(self, page: str, pk: int) -> str:
        return reverse(f"{self.admin_site.name}:exactly_once_operation_{page}", args=[pk])

    @admin.display(description=_("state"))
    def state_badge(self, row: Any) -> SafeString:
        shown = badge(row.get_state_display(), _TONES.get(row.state, Tone.OVER))
        return stacked(shown, format_html("{}", _("being cancelled"))) if row.is_open and row.cancelled_by else shown

    @admin.display(description=_("state"))
    def state_explained(self, row: Any) -> SafeString:
        shown = self.state_badge(row)
        if row.state == OperationState.STOPPED:
            return format_html("{}{}", shown, warning(_("It stopped by itself: %s.") % visible(row.stopped_because)))
        if row.state == OperationState.CANCELLED:
            return format_html("{}{}", shown, note(_("Cancelled by %s.") % visible(row.cancelled_by)))
        if row.state == OperationState.PLANNED and row.database_now - row.planned_at > timedelta(seconds=15):
            return format_html("{}{}", shown, warning(_("No process has begun it. Is a relay or a consumer running?")))
        return shown

    @admin.display(description=_("operation"))
    def what(self, row: Any) -> SafeString:
        return stacked(format_html("{}", self.action_label(row)), identifier(row.selection), app_name(row.app))

    @admin.display(description=_("action"))
    def action_label(self, row: Any) -> str:
        of = operated.get(row.app)
        action = of and of.actions.get(row.action)
        label = str(action.label) if action else str(row.action)
        return _("%s, as a canary") % label if row.is_canary else label

    @admin.display(description=_("messages"))
    def selection_text(self, row: Any) -> SafeString:
        return identifier(row.selection)

    @admin.display(description=_("parameters"))
    def parameters(self, row: Any) -> SafeString:
        return stacked(*(identifier(f"{name}: {value}") for name, value in row.given.items()))

    @admin.display(description=_("progress"))
    def progress(self, row: Any) -> SafeString:
        counts = _("%(processed)s of %(total)s; done: %(done)s, refused: %(refused)s, failed: %(failed)s") % {
            "processed": f"{row.processed:,}",
            "total": f"{row.total:,}",
            "done": f"{row.done:,}",
            "refused": f"{row.refused:,}",
            "failed": f"{row.failed:,}",
        }
        bar = format_html(
            '<progress class="message-progress" value="{}" max="{}"></progress>', row.processed, max(row.total, 1)
        )
        lines = [bar, format_html("{}", counts)]
        if row.is_open and row.started_at and row.processed and not row.is_canary:
            seconds = max((row.database_now - row.started_at).total_seconds(), 0.001)
            rate = row.processed / seconds
            left = duration(timedelta(seconds=(row.total - row.processed) / rate))
            lines.append(
                format_html("{}", _("%(rate)s per second, about %(left)s left") % {"rate": f"{rate:,.0f}", "left": left})
            )
        return stacked(*lines)

    @admin.display(description=_("canary"))
    def canary_text(self, row: Any) -> str:
        text = _("waves so far: %(wave)s; succeeded since: %(succeeded)s, failed again: %(failed)s") % {
            "wave": row.wave,
            "succeeded": f"{row.succeeded:,}",
            "failed": f"{row.failed_again:,}",
        }
        if row.is_open and row.wave_rows:
            text += "; " + _("messages of the last wave that are awaited: %s") % f"{len(row.wave_rows):,}"
        return text

    @admin.display(description=_("failed again"))
    def failing_messages(self, row: Any) -> SafeString:
        """The messages that have stopped a canary."""
        url, words = partial(message_url, self.admin_site, row.app), _("message %s")
        shown = ((url(pk), words % pk, visible(failure)) for pk, failure in row.wave_rows[:_MOST_FAILED_AGAIN])
        return stacked(*(format_html('<a href="{}">{}</a>: {}', *each) for each in shown))

    @admin.display(description=_("unchanged, by reason"))
    def reasons_table(self, row: Any) -> SafeString:
        counted = sorted(row.reasons.items(), key=lambda item: -item[1])
        return stacked(*(format_html("{}: {}", f"{count:,}", visible(reason)) for reason, count in counted))

    @admin.display(description=_("messages"))
    def unchanged_table(self, row: Any) -> SafeString:
        lines = format_html_join(
            "", "<tr><td>{}</td><td>{}</td></tr>", ((identifier(name), visible(why)) for _row, name, why in row.unchanged)
        )
        more = row.refused + row.failed - len(row.unchanged)
        return format_html(
            '<div class="message-block"><div class="message-list" tabindex="0"><table><tbody>{}</tbody></table></div>{}</div>',
            lines,
            note(
                _("Only the first %(kept)s are listed; %(more)s more are counted above.")
                % {"kept": UNCHANGED_KEPT, "more": more}
            )
            if more > 0
            else "",
        )

    @admin.display(description=_("requested by"))
    def requested(self, row: Any) -> SafeString:
        return identifier(row.requested_by)

    @admin.display(description=_("reason"))
    def reason_text(self, row: Any) -> str:
        return visible(row.reason) or NOTHING

    @admin.display(description=_("rate limit"))
    def rate_text(self, row: Any) -> str:
        return str(_("%s messages per second") % row.rate)

    @admin.display(description=_("executed by"))
    def holder_name(self, row: Any) -> SafeString:
        return identifier(row.holder)

    @admin.display(description=_("planned"))
    def planned_by(self, row: Any) -> SafeString:
        """In the list: when and by whom."""
        by_whom = format_html("{} {}", _("by"), identifier(row.requested_by))
        return stacked(age(row.planned_at, row.database_now, str(_("planned "))), by_whom)

    @admin.display(description=_("planned"))
    def planned_exactly(self, row: Any) -> SafeString:
        return moment(row.planned_at, row.database_now)

    @admin.display(description=_("started"))
    def started_exactly(self, row: Any) -> SafeString:
        return moment(row.started_at, row.database_now)

    @admin.display(description=_("ended"))
    def ended_exactly(self, row: Any) -> SafeString:
        return moment(row.ended_at, row.database_now)


def _visible_apps(request: HttpRequest) -> list[str]:
    return [app for app, of in operated.items() if of.is_visible(request.user)]
