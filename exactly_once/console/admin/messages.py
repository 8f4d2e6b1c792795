"""Admin pages of messages, shared by both apps: searching messages and showing their content.

This module contains no model: its subclasses declare theirs.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.views.main import SEARCH_VAR
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin import message_search as searching
from exactly_once.console.admin.acting import ActingAdmin
from exactly_once.console.admin.actions import Action
from exactly_once.console.admin.filters import FAILING, in_states
from exactly_once.console.admin.html import as_html, flow_link, headline, identifier, state_badge, text
from exactly_once.console.admin.pages import LeanChangeList, computed, download, instant, shown
from exactly_once.console.admin.sections import listed, view_permission
from exactly_once.console.admin.trail import timeline
from exactly_once.console.display import as_json, ngettext, number, visible
from exactly_once.console.operators.audit import Subject, actor_of, record
from exactly_once.console.operators.message_history import history_of
from exactly_once.console.operators.redaction import Redaction
from exactly_once.half import halves


class MessageChangeList(LeanChangeList):
    """A list that selects nothing, and says why, if its URL has a search or a filter that cannot be understood.

    An action on all matching messages would otherwise change messages that the operator did not mean.

    Attributes:
        problem: what cannot be understood; "" if nothing.
        note: what was not searched; "" if nothing.
    """

    problem = ""
    note = ""

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        rows = super().get_queryset(request, exclude_parameters)
        self.problem = self._unknown_value() or self._unreadable_search(request)
        if self.problem:
            return rows.none()
        if searching.is_cut(request):
            self.note = gettext(
                "Only %(most)s messages were searched: the newest, or the oldest of those that are not settled. Choose a "
                "state, a topic or another filter to search others."
            ) % {"most": number(searching.MOST_SEARCHED)}
        return rows

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        self._order = self.model_admin.get_ordering(request)
        return super().get_ordering(request, queryset)

    def _get_default_ordering(self) -> Any:
        """The order whose arrow the head of the list shows."""
        return self._order

    def _unknown_value(self) -> str:
        for spec in self.filter_specs:
            if not isinstance(spec, admin.SimpleListFilter):
                continue
            value = spec.value()
            if value and value not in {str(known) for known, _label in spec.lookup_choices}:
                words = gettext("The filter “%(filter)s” has no value “%(value)s”. Nothing is selected.")
                return visible(words % {"filter": spec.title, "value": value})
        return ""

    def _unreadable_search(self, request: HttpRequest) -> str:
        if request.GET.get(SEARCH_VAR, "").strip() and not self.query.strip():
            return gettext("The search has characters that cannot be searched for. Nothing is selected.")
        try:
            searching.read(self.query)
        except searching.BadSearch as error:
            return visible(gettext("This search was not understood. %(why)s") % {"why": error})
        return ""


class MessageAdmin(ActingAdmin):
    """Read-only messages with actions."""

    large_columns: ClassVar[Sequence[str]] = ("body", "headers")
    age_column: ClassVar[str] = "id"
    """It grows with time, and has an index."""
    born_column: ClassVar[str]
    """Since when the message is here."""
    unsettled: ClassVar[Q]
    life_after: ClassVar[int] = 2
    """After so many parts of its page a message's life is shown."""
    identity: ClassVar[Sequence[str]] = ("message_id",)
    """The columns that name a message in the trail."""
    ordering: ClassVar[Any] = ("-id",)
    sortable_by: ClassVar[Any] = ("age",)  # Anything else would sort the whole table.
    search_fields = ("message_id",)  # Makes the search box appear; get_search_results() reads it.
    search_help_text = _(
        "An exact message id, biz-id or topic, or a part of an error; a prefix of a topic or biz-id with a * at the end; "
        "key:customer-4 or headers.tenant:acme."
    )

    def topics(self) -> Sequence[str]:
        """The topics to offer in the filter."""
        raise NotImplementedError

    def redaction(self) -> Redaction:
        raise NotImplementedError

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[LeanChangeList]:
        return MessageChangeList

    def counterpart(self) -> Any:
        """The model of the messages of the other half; None if it is not installed."""
        return next((half.messages for half in halves() if half.app != self.package), None)

    def _elsewhere(self, request: HttpRequest, term: str) -> dict[str, Any]:
        """For a template: the list of the other half, with a search."""
        model: Any = self.counterpart()
        url = listed(model, q=term).url(self.admin_site, request) if model and term else ""
        return {"counterpart": model and model._meta.verbose_name_plural, "counterpart_url": url}

    def selection_text(self, request: HttpRequest) -> str:
        selection = super().selection_text(request)
        words = gettext("%(selection)s, of the %(most)s messages that were searched")
        limited = words % {"selection": selection, "most": number(searching.MOST_SEARCHED)}
        return limited if searching.is_cut(request) else selection

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """With a link to the same search in the other app."""
        found = self._elsewhere(request, request.GET.get(SEARCH_VAR, "").strip())
        return super().changelist_view(request, {**found, **(extra_context or {})})

    def subject(self, row: Any) -> str:
        """The name of a message in a report."""
        return visible(f"{row.message_id} ({row.topic} {row.biz_id})")

    def audited_id(self, row: Any) -> str:
        return str(row.message_id)

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[QuerySet[Any], bool]:
        try:
            search = searching.read(search_term)
        except searching.BadSearch:
            return queryset.none(), False
        return self._found(request, queryset, search), False

    def _found(self, request: HttpRequest, rows: QuerySet[Any], search: str | Q) -> QuerySet[Any]:
        if isinstance(search, Q):
            return searching.newest(request, rows, self.age_column).filter(search)
        named = rows.filter(self.called(search)) if search else rows
        if not search or named.exists():
            return named
        return searching.newest(request, rows.filter(in_states(FAILING)), self.age_column).filter(last_error__icontains=search)

    def badge_of(self, row: Any) -> SafeString:
        return state_badge(row.state)

    def link_to(self, row: Any) -> tuple[str, SafeString, str]:
        """The page of another message, its name and its state, for a sentence."""
        return self.own_url(row.pk), identifier(f"{row.topic} {row.biz_id}"), row.get_state_display().lower()

    topic_name = shown(_("topic"), "topic", identifier)
    biz_id_name = shown(_("biz-id"), "biz_id", identifier)
    message_id_name = computed(_("message id"), lambda row: flow_link(row, row.message_id))
    key_name = shown(_("ordering key"), "key", identifier)
    correlation_id_name = computed(_("correlation id"), lambda row: flow_link(row, row.correlation_id))
    causation_id_name = computed(_("causation id"), lambda row: flow_link(row, row.causation_id))
    traceparent_name = shown(_("traceparent"), "traceparent", identifier)

    error_headline = shown(_("last error"), "last_error", headline)

    def attempts_line(self, row: Any) -> SafeString:
        """In the list; empty before the first attempt."""
        words = ngettext("%(count)s attempt", "%(count)s attempts", row.attempts)
        return format_html('<span class="message-quiet">{}</span>', words if row.attempts else "")

    error_text = shown(_("last error"), "last_error", text)

    @admin.display(description=_("headers"))
    def headers_text(self, row: Any) -> SafeString | str:
        return "" if row.headers == {} else as_html(as_json(self.redaction().headers(row.headers)))

    created = instant(_("created"), "created_at")
    settled = instant(_("settled"), "settled_at")

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any) -> HttpResponse:
        row: Any = kwargs.get("obj")
        context |= {"has_reason": True, "life_after": self.life_after}
        if row is not None and row.message_id:
            if request.user.has_perm(f"{self.opts.app_label}.view_trailentry"):
                context["life"] = self._timeline(request, row)
            context |= self._elsewhere(request, str(row.message_id))
        return super().render_change_form(request, context, *args, **kwargs)

    def _timeline(self, request: HttpRequest, row: Any) -> SafeString:
        model: Any = self.counterpart()
        needed = [view_permission(model), f"{model._meta.app_label}.view_trailentry"] if model else []
        may_see_all = request.user.has_perms(needed)
        hidden = gettext("Users with the permission to view %(what)s see more of its history here.")
        return timeline(
            history_of(str(row.message_id)),
            lambda where: may_see_all or (where == "outbox") == (self.package == "outbox"),
            row.flow_url,
            hidden % {"what": model and model._meta.verbose_name_plural},
            row.last_error,
        )

    def export(self, request: HttpRequest, queryset: QuerySet[Any]) -> Any:
        """A file with the dead letters among the selected messages, of any number: see `dead_letters`."""
        rows = queryset.filter(state__in=EXPORT.sources)
        total = rows.count()
        if not total:
            self.message_user(request, gettext("Nothing was exported: none of the messages is a dead letter."), messages.ERROR)
            return None
        if request.POST.get("select_across") == "1":
            subjects = [Subject(kind="messages", name=self.selection_text(request))]
        else:
            subjects = [Subject(kind=self.kind, id=self.audited_id(row), name=self.subject(row)) for row in rows]
        record(self.package, queryset.db, actor_of(request), "export", subjects, {"messages": total})
        return download(
            request, f"{self.opts.app_label}-dead-letters.jsonl", "application/jsonl", self.half.letters.lines(rows)
        )


EXPORT = Action(
    name="export",
    label=_("Export dead letters"),
    sources=("dead",),
    respond=lambda model_admin, request, queryset, given: model_admin.export(request, queryset),
)
