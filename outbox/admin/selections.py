"""Lists of the messages in some states. Their links lead to the message's page in the list of all messages."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.acting import counted
from exactly_once.console.admin.columns import instant, shown
from exactly_once.console.admin.filters import ConditionFilter, Conditions, StateFilter
from exactly_once.console.display import (
    NOTHING,
    Tone,
    age,
    badge,
    clock,
    duration,
    headline,
    identifier,
    number,
    stacked,
    warning,
)
from exactly_once.sql.now import DatabaseTime
from outbox.admin.messages import OutboxMessageAdmin
from outbox.callbacks import checkers
from outbox.conf import outbox_options
from outbox.models import OutboxMessage, PreparedMessage, ScheduledMessage
from outbox.operators.operations import ASK_AGAIN, CANCEL_THEM, COMMIT_THEM, PUBLISH_THEM_NOW, RESCHEDULE_THEM, ROLL_THEM_BACK
from outbox.states import UNDECIDED, State


class SelectionAdmin(OutboxMessageAdmin):
    """A list for every user with the permission to view messages."""

    selected: ClassVar[Sequence[State]]
    list_display_links = ("summary",)
    sortable_by = ()
    # The page of a message links back to the list of all messages, which has other filters.
    preserve_filters = False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).filter(state__in=self.selected)

    def everything(self, request: HttpRequest) -> QuerySet[Any]:
        return OutboxMessage.objects.using(self.using).annotate(database_now=DatabaseTime())

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.view_outboxmessage")

    def warnings(self, request: HttpRequest) -> Sequence[SafeString]:
        return ()

    def own_url(self, pk: Any) -> str:
        return reverse(f"{self.admin_site.name}:{self.opts.app_label}_outboxmessage_change", args=[pk])

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> HttpResponse:
        return HttpResponseRedirect(self.own_url(object_id))


class DueFilter(ConditionFilter):
    """By the time until they are due."""

    title = _("due")
    parameter_name = "due"
    fixed: ClassVar[Any] = {
        "minute": (_("Within a minute"), Q(available_at__lt=DatabaseTime(timedelta(minutes=1)))),
        "hour": (_("Within an hour"), Q(available_at__lt=DatabaseTime(timedelta(hours=1)))),
        "day": (_("Within a day"), Q(available_at__lt=DatabaseTime(timedelta(days=1)))),
        "week": (_("Within a week"), Q(available_at__lt=DatabaseTime(timedelta(days=7)))),
    }

    def conditions(self, model_admin: Any) -> Conditions:
        after = model_admin.stuck_after()
        words = gettext("Overdue by %(time)s") % {"time": duration(after)}
        return {"overdue": (words, Q(available_at__lt=DatabaseTime(-after))), **self.fixed}


@admin.register(ScheduledMessage)
class ScheduledMessageAdmin(SelectionAdmin):
    """In the order of their due times, which is that of the index."""

    selected = (State.SCHEDULED,)
    ordering = ("available_at", "id")
    list_display = ("due_in", "summary", "conditions", "delay")
    list_filter = (DueFilter,)
    actions = (PUBLISH_THEM_NOW, RESCHEDULE_THEM, CANCEL_THEM)
    nothing = _("No message is scheduled. One that is published with a delay or for a later time stands here until it is due.")
    hint = _("The message that is due next comes first. Times are in the time zone of this site.")

    def warnings(self, request: HttpRequest) -> Sequence[SafeString]:
        overdue = self.get_queryset(request).filter(available_at__lt=DatabaseTime(-self.stuck_after()))
        if not overdue.exists():
            return ()
        late = gettext("Overdue by more than %(time)s: %(count)s. Check whether a relay runs.") % {
            "time": duration(self.stuck_after()),
            "count": counted(overdue),
        }
        return (warning(late),)

    @admin.display(description=_("due"))
    def due_in(self, row: Any) -> SafeString:
        due = age(row.available_at, row.database_now)
        if row.available_at < row.database_now - self.stuck_after():
            due = format_html("{} {}", badge(gettext("Overdue"), Tone.STOPPED), due)
        return stacked(due, clock(row.available_at))

    @admin.display(description=_("key, priority, expiry"))
    def conditions(self, row: Any) -> SafeString:
        lines = []
        if row.key:
            lines.append(format_html(gettext("key {}"), identifier(row.key)))
        if row.priority:
            lines.append(format_html(gettext("priority {}"), row.priority))
        if row.expires_at is not None:
            lines.append(age(row.expires_at, row.database_now, gettext("expires ")))
        return stacked(*lines) if lines else format_html("{}", NOTHING)

    @admin.display(description=_("created, delay"))
    def delay(self, row: Any) -> SafeString:
        # An instant computed just before the call gives slightly less than a whole duration, which would be rounded down.
        delay = max(row.available_at - row.created_at, timedelta()) + timedelta(milliseconds=500)
        return stacked(age(row.created_at, row.database_now), format_html(gettext("delayed by {}"), duration(delay)))


class UndecidedFilter(StateFilter):
    """By the two undecided states."""

    def states(self, model_admin: Any) -> list[tuple[str, str]]:
        return [(state, label) for state, label in super().states(model_admin) if state in model_admin.selected]


@admin.register(PreparedMessage)
class PreparedMessageAdmin(SelectionAdmin):
    """Stuck messages first, then in the order of their next check, which is that of the index."""

    selected = UNDECIDED
    ordering = ("-state", "available_at", "id")
    list_display = ("state_badge", "summary", "prepared", "checks", "said")
    list_filter = (UndecidedFilter,)
    actions = (COMMIT_THEM, ROLL_THEM_BACK, ASK_AGAIN)
    nothing = _("No prepared message waits for a decision. Each one stands here until it is committed or rolled back.")
    hint = _(
        "A relay asks the checkers. Stuck messages come first: their checkers are not asked any more, so an operator must "
        "find out what happened."
    )

    prepared = instant(_("prepared"), "created_at", age)

    @admin.display(description=_("next check, answers so far"))
    def checks(self, row: Any) -> SafeString:
        next_one = age(row.available_at, row.database_now, gettext("due "))
        lines = [format_html("{}", gettext("none: an operator decides")) if row.state == State.STUCK else next_one]
        if row.attempts:
            lines.append(
                format_html(gettext("unknown {} of {} times"), number(row.attempts), number(outbox_options().CHECKS.LIMIT))
            )
        if checkers.of(row.topic) is None:
            lines.append(badge(gettext("No checker here"), Tone.FAILING))
        return stacked(*lines)

    said = shown(_("last answer"), "last_error", headline)
