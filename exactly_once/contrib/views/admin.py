"""The page of idempotent requests: which key had which answer, without headers and bodies."""

from django.contrib import admin
from django.db.models import Q
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.acting import ActingAdmin
from exactly_once.console.admin.html import Tone, age, badge, identifier, stacked
from exactly_once.console.admin.pages import computed, instant, shown
from exactly_once.contrib.views.models import IdempotentRequest


@admin.register(IdempotentRequest)
class IdempotentRequestAdmin(ActingAdmin):
    """The latest first."""

    nothing = _("No response is stored.")
    hint = _("Requests with an Idempotency-Key whose effect is committed. A repeated request gets the stored response.")
    large_columns = ("headers", "body")
    actions = None
    ordering = ("-id",)
    search_fields = ("key",)  # Makes the search box appear; called() reads it.
    search_help_text = _("A key, a scope or a view, exact.")
    list_display = fields = ("state_badge", "name", "view_name", "when", "expires")
    list_display_links = ("name",)

    def called(self, term: str) -> Q:
        return Q(key=term) | Q(scope=term) | Q(view=term)

    def badge_of(self, row: IdempotentRequest) -> SafeString:
        return badge(gettext("unknown"), Tone.STOPPED) if row.status is None else badge(str(row.status), Tone.DONE)

    name = computed(_("key, scope"), lambda row: stacked(identifier(row.key), identifier(row.scope)))
    view_name = shown(_("view"), "view", identifier)
    when = instant(_("time"), "at", age)
    expires = instant(_("expires"), "expires_at")
