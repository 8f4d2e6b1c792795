"""The admin page of pauses: topics in the outbox, handlers in the inbox. Adding a row pauses the topic or handler."""

from collections.abc import Iterable
from typing import Any

from django import forms
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.acting import ActingAdmin
from exactly_once.console.admin.actions import ActionForm, reason_field
from exactly_once.console.admin.html import Tone, age, badge, headline, identifier, labelled, text
from exactly_once.console.admin.pages import computed, instant, shown


class KnownNames(forms.TextInput):
    """A text with proposals. Any other name may be written."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(attrs={"class": "vTextField", "list": "known-names", "autofocus": True})
        self._names = names

    def render(self, *args: Any, **options: Any) -> SafeString:
        known = format_html_join("", '<option value="{}"></option>', ((name,) for name in self._names))
        return format_html('{}<datalist id="known-names">{}</datalist>', super().render(*args, **options), known)


class PauseForm(ActionForm):
    """Asks for a name, in its first field."""

    reason = reason_field(_("Optional. It is shown on the page of the pauses, and logged."), required=False)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        (name,) = self.fields.keys() - {"reason"}
        self.fields[name].widget = KnownNames(self.known())
        self.order_fields((name, "reason"))

    def known(self) -> Iterable[str]:
        """The names to propose."""
        raise NotImplementedError


def pause_badge(row: Any) -> SafeString:
    """What operators have paused, or a rate limits, is not a failure."""
    # Handlers are paused by operators only, so they have no mode.
    label = row.get_mode_display() if _mode(row) else gettext("Paused")
    return badge(label, Tone.FAILING if _mode(row) == "refused" else Tone.LATER)


def paused_by(row: Any) -> SafeString:
    if row.paused_by:
        return identifier(row.paused_by)
    return format_html("{}", gettext("its rate") if _mode(row) == "limited" else gettext("circuit breaker"))


def _mode(row: Any) -> str:
    return getattr(row, "mode", "")


class PausedAdmin(ActingAdmin):
    """One row for each paused name."""

    def badge_of(self, row: Any) -> SafeString:
        return pause_badge(row)

    by_whom = computed(_("by"), lambda row: labelled(_("by"), paused_by(row)))
    since = instant(_("since"), "paused_at", age)
    since_exactly = instant(_("since"), "paused_at")
    why = shown(_("why"), "reason", headline)
    reason_text = shown(_("why"), "reason", text)
