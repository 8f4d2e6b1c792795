"""The page of the alerts; see `upkeep.alerting`."""

from datetime import timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import F, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.acting import ActingAdmin
from exactly_once.console.admin.actions import Action
from exactly_once.console.admin.filters import AppFilter, ConditionFilter
from exactly_once.console.admin.html import NOTHING, Tone, age, app_name, badge, headline, identifier, stacked, text, warning
from exactly_once.console.admin.pages import computed, instant, shown
from exactly_once.console.display import visible
from exactly_once.console.operators.alerts import acknowledge
from exactly_once.console.operators.changes import each
from exactly_once.half import half_of
from exactly_once.models import Alert, Lease
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.alerting import intervals, lease_name

_State = Alert.State
_UNEVALUATED_FOR = timedelta(minutes=5)


class AlertStateFilter(ConditionFilter):
    """Open ones unless another choice is made."""

    title = _("state")
    parameter_name = "state"
    default = (_("Raised"), Q(state=_State.RAISED))
    fixed: ClassVar[Any] = {
        "new": (_("Not acknowledged"), Q(state=_State.RAISED, acknowledged_at=None)),
        "cleared": (_("Cleared"), Q(state=_State.CLEARED)),
        "all": (_("All"), Q()),
    }


ACKNOWLEDGE = Action(
    name="acknowledge",
    label=_("Acknowledge"),
    done=_("acknowledged"),
    perform=each(
        Alert, lambda alias, pk, given: acknowledge(alias, pk, given.who), _("it is cleared, or acknowledged already")
    ),
    offered=lambda row: row.state == _State.RAISED and row.acknowledged_at is None,
)


@admin.register(Alert)
class AlertAdmin(ActingAdmin):
    """The alerts, the latest first."""

    kind = "alert"
    noun = _("alert")
    nouns = _("alerts")
    nothing = _("No alert is raised.")
    hint = _(
        "Running processes evaluate the conditions once a minute. An alert is raised after several evaluations that meet its "
        "condition, and cleared after several that do not. To acknowledge it changes nothing else."
    )
    ordering = (F("raised_at").desc(nulls_last=True), "-id")
    list_filter = (AlertStateFilter, AppFilter)
    actions = (ACKNOWLEDGE,)
    list_display = ("status", "what", "report")
    list_display_links = ("what",)
    fields: ClassVar[Any] = (
        *("state_badge", "app_name", "what", "summary_text", "first_seen", "raised_exactly", "last_seen", "cleared"),
        *("acknowledged", "deliveries", "error_text"),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).filter(~Q(state=_State.PENDING))

    def warnings(self, request: HttpRequest) -> list[SafeString]:
        leases = Lease.objects.using(self.using).annotate(database_now=DatabaseTime())
        every = {lease_name(app): interval for app, interval in intervals().items()}
        evaluated: Any = leases.filter(name__in=every, done_at__isnull=False).order_by("done_at")
        if not evaluated:
            words = gettext("The conditions have not been evaluated yet. A running relay or consumer does so once a minute.")
            return [warning(words)]
        words = gettext("The conditions were last evaluated {}, so this page is out of date. No process evaluates them.")
        overdue = (one for one in evaluated if one.database_now - one.done_at > _UNEVALUATED_FOR + every[one.name])
        return [warning(format_html(words, age(one.done_at, one.database_now))) for one in overdue][:1]

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any) -> HttpResponse:
        """With a link to where an operator acts on it, if its app has such a condition."""
        alert: Any = kwargs["obj"]
        half = half_of(alert.app)
        if half and (condition := half.section.conditions.get(alert.condition)):
            link = condition.link(alert.object)
            context["row_links"] = [(link.title, url)] if (url := link.url(self.admin_site, request)) else []
        return super().render_change_form(request, context, *args, **kwargs)

    def badge_of(self, row: Any) -> SafeString:
        if row.state == _State.CLEARED:
            return badge(gettext("Cleared"), Tone.DONE)
        return badge(gettext("Acknowledged"), Tone.LATER) if row.acknowledged_at else badge(gettext("Raised"), Tone.STOPPED)

    app_name = computed(_("app"), lambda row: app_name(row.app))

    what = computed(_("condition, object"), lambda row: stacked(*map(identifier, filter(None, (row.condition, row.object)))))

    @admin.display(description=_("state"))
    def status(self, row: Any) -> SafeString:
        """In the list: the badge, since when, and who has acknowledged it."""
        raised = format_html(gettext("raised {}"), age(row.raised_at, row.database_now))
        lines = [self.badge_of(row), self.app_name(row), raised]
        if row.acknowledged_at:
            lines.append(format_html(gettext("acknowledged by {}"), visible(row.acknowledged_by)))
        if row.cleared_at:
            lines.append(format_html(gettext("cleared {}"), age(row.cleared_at, row.database_now)))
        return stacked(*lines)

    @admin.display(description=_("summary"))
    def report(self, row: Any) -> SafeString:
        """In the list: the summary, and what could not be sent."""
        return stacked(headline(row.summary), self.deliveries(row)) if row.unsent else headline(row.summary)

    summary_text = shown(_("summary"), "summary", text)
    raised_exactly = instant(_("raised"), "raised_at")
    first_seen = instant(_("first seen"), "first_seen_at")
    last_seen = instant(_("last seen"), "seen_at")
    cleared = instant(_("cleared"), "cleared_at")

    @admin.display(description=_("acknowledged"))
    def acknowledged(self, row: Any) -> SafeString:
        by_whom = identifier(row.acknowledged_by)
        return stacked(by_whom, age(row.acknowledged_at, row.database_now)) if row.acknowledged_at else NOTHING

    @admin.display(description=_("notifications"))
    def deliveries(self, row: Any) -> SafeString:
        if not row.unsent:
            return NOTHING
        lines = [format_html(gettext("not sent by {}: {}"), channel, event) for event, channel in row.unsent]
        next_try = format_html(gettext("next try {}"), age(row.send_at, row.database_now))
        return stacked(*lines, next_try if row.send_at else gettext("given up"))

    error_text = shown(_("last error of a notification"), "send_error", text)
