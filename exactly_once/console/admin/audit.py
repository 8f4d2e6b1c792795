"""The page of the audit log, with filters and export; see `operators.audit`."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseNotFound
from django.urls import path, reverse
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.acting import ActingAdmin
from exactly_once.console.admin.filters import AppFilter, ConditionFilter, ValueFilter
from exactly_once.console.admin.html import NOTHING, app_name, as_html, clock, flow_link, identifier, stacked
from exactly_once.console.admin.pages import computed, download, instant
from exactly_once.console.display import as_json, visible
from exactly_once.models import AuditEntry
from exactly_once.sql.now import DatabaseTime

_LONGEST_SHOWN = 120
_FIELDS = ("id", "at", "app", "actor", "place", "address", "action", "kind", "object_id", "name", "parameters")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class _OccurringFilter(ValueFilter):
    """By a value that occurs in the log."""

    most = 100

    def known(self, model_admin: Any) -> Sequence[str]:
        column = str(self.parameter_name)
        rows = AuditEntry.objects.using(model_admin.using).order_by(column)
        return list(rows.values_list(column, flat=True).distinct()[: self.most])


class ActorFilter(_OccurringFilter):
    title = _("who")
    parameter_name = "actor"


class ActionFilter(_OccurringFilter):
    title = _("action")
    parameter_name = "action"


class KindFilter(_OccurringFilter):
    title = _("kind")
    parameter_name = "kind"


class TimeFilter(ConditionFilter):
    """By time, by the database's clock."""

    title = _("time")
    parameter_name = "within"
    fixed: ClassVar[Any] = {
        "hour": (_("Last hour"), Q(at__gte=DatabaseTime(-timedelta(hours=1)))),
        "day": (_("Last 24 hours"), Q(at__gte=DatabaseTime(-timedelta(days=1)))),
        "week": (_("Last 7 days"), Q(at__gte=DatabaseTime(-timedelta(days=7)))),
        "month": (_("Last 30 days"), Q(at__gte=DatabaseTime(-timedelta(days=30)))),
    }


@admin.register(AuditEntry)
class AuditAdmin(ActingAdmin):
    """The entries, latest first. They cannot be changed, and those of a search can be exported."""

    noun = _("entry")
    nothing = _("No operator has done anything yet.")
    hint = _("What operators have done in the admin and with commands. Entries are deleted only after AUDIT_RETENTION.")

    ordering = ("-id",)
    actions = None
    list_filter: ClassVar[Any] = (TimeFilter, AppFilter, ActorFilter, ActionFilter, KindFilter)
    search_fields = ("object_id",)  # Makes the search box appear; called() reads it.
    search_help_text = _("The exact id or name of an object, a user name or an address.")
    list_display = ("when", "who", "what", "object", "given")
    list_display_links = ("when",)
    fields: ClassVar[Any] = ("when_exactly", "who", "what", "object_in_full", "all_given")

    def has_export_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("exactly_once.export_auditentry")

    def called(self, term: str) -> Q:
        return Q(object_id=term) | Q(actor=term) | Q(address=term) | Q(name=term)

    def get_urls(self) -> Any:
        name = "exactly_once_auditentry_export"
        return [path("export/<str:form>/", self.admin_site.admin_view(self.export), name=name), *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        name = f"{self.admin_site.name}:exactly_once_auditentry_export"
        forms = {"csv": gettext("Export CSV"), "jsonl": gettext("Export JSON lines")}
        links = [(label, reverse(name, args=[form], query=request.GET)) for form, label in forms.items()]
        links = links if self.has_export_permission(request) else []
        return super().changelist_view(request, {"page_links": links, **(extra_context or {})})

    def export(self, request: HttpRequest, form: str) -> Any:
        """The entries that the list shows, on all of its pages."""
        if not (self.has_view_permission(request) and self.has_export_permission(request)):
            raise PermissionDenied
        if form not in _EXPORTS:
            return HttpResponseNotFound()
        content_type, lines = _EXPORTS[form]
        rows = self.get_changelist_instance(request).get_queryset(request)
        return download(request, f"audit.{form}", content_type, lines(rows.iterator(chunk_size=1000)))

    when = computed(_("time"), lambda row: clock(row.at))
    when_exactly = instant(_("time"), "at")

    @admin.display(description=_("who, where"))
    def who(self, row: Any) -> SafeString:
        return stacked(identifier(row.actor), visible(row.place), identifier(row.address))

    @admin.display(description=_("action"))
    def what(self, row: Any) -> SafeString:
        return stacked(visible(row.action), visible(row.kind), app_name(row.app))

    object = computed(_("object"), lambda row: identifier(row.name or row.object_id))

    @admin.display(description=_("object"))
    def object_in_full(self, row: Any) -> SafeString:
        object_id = flow_link(row, row.object_id) if row.kind == "message" else identifier(row.object_id)
        return stacked(identifier(row.name), object_id) if row.object_id else identifier(row.name)

    @admin.display(description=_("parameters"))
    def given(self, row: Any) -> SafeString:
        lines = (f"{visible(name)}: {_short(value)}" for name, value in row.parameters.items())
        return stacked(*lines) if row.parameters else NOTHING

    all_given = computed(_("parameters"), lambda row: as_html(as_json(row.parameters)) if row.parameters else NOTHING)


def _short(value: Any) -> str:
    text = visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"


def _values(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) if name != "at" else row.at.isoformat() for name in _FIELDS}


def _as_json_lines(rows: Iterator[Any]) -> Iterator[str]:
    for row in rows:
        yield json.dumps(_values(row), ensure_ascii=False) + "\n"


class _Lines:
    """A file that returns what is written to it."""

    def write(self, line: str) -> str:
        return line


def _as_csv(rows: Iterator[Any]) -> Iterator[str]:
    write: Callable[[Iterable[str]], Any] = csv.writer(_Lines()).writerow
    yield write(_FIELDS)
    for row in rows:
        yield write(_cell(value) for value in _values(row).values())


def _cell(value: Any) -> str:
    """A spreadsheet would compute a text that begins like a formula."""
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


_EXPORTS: dict[str, tuple[str, Callable[[Iterator[Any]], Iterator[str]]]] = {
    "csv": ("text/csv", _as_csv),
    "jsonl": ("application/jsonl", _as_json_lines),
}
