"""The admin page of pauses: topics in the outbox, handlers in the inbox. Adding a row pauses the topic or handler."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db import transaction
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from exactly_once.admin.acting import ActingAdmin, by
from exactly_once.display import age, as_text, headline, moment, visible
from exactly_once.operators.actions import permission


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
