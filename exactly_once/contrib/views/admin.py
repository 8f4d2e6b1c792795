"""The page of idempotent requests: which key had which answer, without headers and bodies."""

from http import HTTPStatus

from django.contrib import admin
from django.db.models import Q
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.acting import ActingAdmin
from exactly_once.console.admin.html import Tone, age, badge, identifier, labelled, stacked
from exactly_once.console.admin.pages import computed, instant, shown
from exactly_once.contrib.views.models import IdempotentRequest


def _badge(status: int | None) -> SafeString:
    if status is None:
        return badge(gettext("unknown"), Tone.STOPPED)
    return badge(status, Tone.DONE if status < HTTPStatus.BAD_REQUEST else Tone.OVER)


@admin.register(IdempotentRequest)
class IdempotentRequestAdmin(ActingAdmin):
    """The latest first."""

    nothing = _("No response is stored.")
    hint = _(
        "Requests with an Idempotency-Key whose effect is committed. A repeated request gets the stored response; one whose "
        "status is unknown gets an error, because its view has committed by itself."
    )
    large_columns = ("headers", "body")
    actions = None
    ordering = ("-id",)
    search_fields = ("key",)  # Makes the search box appear; called() reads it.
    search_help_text = _("A key, a scope or a view, exact.")
    list_display = ("status_badge", "name", "view_name", "when", "until")
    list_display_links = ("name",)
    fields = ("status_badge", "name", "view_name", "at_time", "expires")

    def called(self, term: str) -> Q:
        return Q(key=term) | Q(scope=term) | Q(view=term)

    name = computed(_("key, scope"), lambda row: stacked(identifier(row.key), identifier(row.scope)))
    view_name = shown(_("view"), "view", identifier)
    status_badge = shown(_("status"), "status", _badge)
    when = instant(_("time"), "at", lambda at, now: labelled(_("time"), age(at, now)))
    until = instant(_("expires"), "expires_at", lambda at, now: labelled(_("expires"), age(at, now)))
    at_time, expires = instant(_("time"), "at"), instant(_("expires"), "expires_at")
