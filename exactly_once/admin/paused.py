"""The admin page of pauses: topics in the outbox, handlers in the inbox. Adding a row pauses the topic or handler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django import forms
from django.contrib import admin
from django.db import transaction
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.admin.acting import ActingAdmin, by
from exactly_once.display import Tone, age, as_text, badge, headline, moment, visible
from exactly_once.operators.actions import permission


class KnownNames(forms.TextInput):
    """A text with proposals. Any other name may be written."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(attrs={"class": "vTextField", "list": "known-names", "autofocus": True})
        self._names = names

    def render(self, *args: Any, **options: Any) -> SafeString:
        known = format_html_join("", '<option value="{}"></option>', ((name,) for name in self._names))
        return format_html('{}<datalist id="known-names">{}</datalist>', super().render(*args, **options), known)


def pause_badge(row: Any) -> SafeString:
    """What operators have paused is not a failure."""
    if getattr(row, "is_resuming", False):
        return badge(gettext("Resuming"), Tone.LATER)
    return badge(gettext("Paused"), Tone.LATER) if row.paused_by else badge(gettext("Refused"), Tone.FAILING)


class PausedAdmin(ActingAdmin):
    """One row for each paused name.

    Attributes:
        named_by: the column with the name.
        shown: the fields of the page of one row.
    """

    named_by: str
    shown: tuple[str, ...]
    add_form_template = "admin/change_form.html"
    sortable_by = ()
    list_filter = ()

    def has_add_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(permission(self.model, "pause"))

    def known(self) -> Iterable[str]:
        """The names to propose."""
        raise NotImplementedError

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        form: Any = super().get_form(request, obj, change=change, **kwargs)
        form.using = self.using
        if obj is None:
            form.base_fields[self.named_by].widget = KnownNames(self.known())
        return form

    def pause(self, row: Any, by: str) -> None:
        """Pause what the new row names."""
        raise NotImplementedError

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return (self.named_by, "reason") if obj is None else self.shown

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return () if obj is None else self.shown

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: Any) -> None:
        """Pause it; what is logged and shown next is its row."""
        with transaction.atomic(using=self.using):
            self.pause(obj, by(request).removeprefix("by "))
            obj.pk = self.get_queryset(request).get(**{self.named_by: getattr(obj, self.named_by)}).pk
            self.audit(request, self.using, "pause", obj)

    def subject(self, row: Any) -> str:
        return visible(self.audited_id(row))

    def audited_id(self, row: Any) -> str:
        return str(getattr(row, self.named_by))

    def badge_of(self, row: Any) -> SafeString:
        return pause_badge(row)

    @admin.display(description=_("state"))
    def state_badge(self, row: Any) -> SafeString:
        return self.badge_of(row)

    @admin.display(description=_("since"))
    def since(self, row: Any) -> SafeString:
        return age(row.paused_at, row.database_now)

    @admin.display(description=_("since"))
    def since_exactly(self, row: Any) -> SafeString:
        return moment(row.paused_at, row.database_now)

    @admin.display(description=_("why"))
    def why(self, row: Any) -> SafeString:
        return headline(row.reason)

    @admin.display(description=_("why"))
    def reason_text(self, row: Any) -> SafeString:
        return as_text(row.reason).as_html()
