"""The scheduled messages, the next one first."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.admin.acting import counted
from exactly_once.display import NOTHING, Tone, age, badge, clock, duration, identifier, stacked, warning
from exactly_once.sql.now import DatabaseTime
from outbox.admin.selections import SelectionAdmin
from outbox.conf import outbox_options
from outbox.models import ScheduledMessage
from outbox.operators.operations import CANCEL_THEM, PUBLISH_THEM_NOW, RESCHEDULE_THEM
from outbox.states import State


class DueFilter(admin.SimpleListFilter):
    """By the time until they are due."""

    title = _("due")
    parameter_name = "due"
    durations: ClassVar[dict[str, tuple[Any, timedelta]]] = {
        "minute": (_("Within a minute"), timedelta(minutes=1)),
        "hour": (_("Within an hour"), timedelta(hours=1)),
        "day": (_("Within a day"), timedelta(days=1)),
        "week": (_("Within a week"), timedelta(days=7)),
    }

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        overdue = ("overdue", gettext("Overdue by %(time)s") % {"time": duration(model_admin.stuck_after())})
        return [overdue, *((name, label) for name, (label, _) in self.durations.items())]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        wanted = self.value()
        if wanted == "overdue":
            return queryset.filter(available_at__lt=DatabaseTime(-outbox_options().STUCK_AFTER))
        if wanted in self.durations:
            _, within = self.durations[wanted]
            return queryset.filter(available_at__lt=DatabaseTime(within))
        return queryset


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
