"""Admin pages of messages, shared by both apps: searching messages and showing their content.

This module contains no model: its subclasses declare theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.views.main import SEARCH_VAR
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html, strip_tags
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.admin import message_search as searching
from exactly_once.admin.acting import ActingAdmin, LeanChangeList
from exactly_once.admin.timeline import timeline
from exactly_once.display import NOTHING, Tone, as_json, as_text, badge, flow_link, headline, identifier, moment, visible
from exactly_once.operators.audit import Subject, actor_of, record
from exactly_once.operators.dead_letters import Letters
from exactly_once.operators.redaction import Redaction
from exactly_once.operators.trail import life_of
from exactly_once.plurals import ngettext
from exactly_once.sql.labels import label_of


@dataclass(frozen=True, kw_only=True)
class Counterpart:
    """The other app's page of the same message.

    Attributes:
        app: its package.
        model: of its messages.
        title: of their list.
    """

    app: str
    model: str
    title: Any

    @property
    def changelist(self) -> str:
        """The list's name in an admin site."""
        return f"{label_of(self.app)}_{self.model}_changelist"

    @property
    def permission(self) -> str:
        """Required to see the other app's data, also where this app shows it."""
        return f"{label_of(self.app)}.view_{self.model}"

    @property
    def trail_permission(self) -> str:
        return f"{label_of(self.app)}.view_trailentry"


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
            ) % {"most": f"{searching.MOST_SEARCHED:,}"}
        return rows

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

    counterpart: ClassVar[Counterpart]
    tones: ClassVar[Mapping[str, Tone]]
    large_columns: ClassVar[Sequence[str]] = ("body", "headers")
    nothing = _("No messages.")
    allowed_in: ClassVar[Mapping[str, Sequence[str]]]
    """By action: the states from which it is allowed."""
    age_column: ClassVar[str] = "id"
    """It grows with time, and has an index."""
    born_column: ClassVar[str]
    """Since when the message is here."""
    unsettled: ClassVar[Q]
    letters: ClassVar[Letters]
    optional: ClassVar[frozenset[str]] = frozenset(
        {
            "key_name",
            "error_text",
            "failing",
            "headers_text",
            "form_text",
            "created",
            "deliver",
            "due_exactly",
            "expires",
            "next_attempt",
            "settled",
            "source_name",
            "correlation_id_name",
            "causation_id_name",
            "traceparent_name",
        }
    )
    """Fields that are shown only with a value."""

    ordering: ClassVar[Any] = ("-id",)
    sortable_by: ClassVar[Any] = ("age",)  # Anything else would sort the whole table.
    search_fields = ("message_id",)  # Makes the search box appear; get_search_results() reads it.
    search_help_text = _(
        "An exact message id, biz-id or topic; a prefix of a topic or biz-id with a * at the end; key:customer-4 or "
        "headers.tenant:acme."
    )

    def stuck_after(self) -> timedelta:
        raise NotImplementedError

    def topics(self) -> Sequence[str]:
        """The topics to offer in the filter."""
        raise NotImplementedError

    def hosts(self) -> Sequence[str]:
        """The hosts to offer in the filter."""
        raise NotImplementedError

    def failed_attempts_in_trail(self) -> QuerySet[Any]:
        """The entries of the trail of a message in an outer query."""
        raise NotImplementedError

    def redaction(self) -> Redaction:
        raise NotImplementedError

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[LeanChangeList]:
        return MessageChangeList

    def selection_text(self, request: HttpRequest) -> str:
        words = super().selection_text(request)
        if not searching.is_cut(request):
            return words
        return gettext("%(selection)s, of the %(most)s messages that were searched") % {
            "selection": words,
            "most": f"{searching.MOST_SEARCHED:,}",
        }

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

    def _found(self, request: HttpRequest, rows: QuerySet[Any], search: searching.Search) -> QuerySet[Any]:
        if search.name:
            return rows.filter(self.called(search.name))
        if search.beginning:
            condition = Q(topic__startswith=search.beginning) | Q(biz_id__startswith=search.beginning)
        elif search.key:
            condition = Q(key=search.key)
        elif search.path:
            condition = searching.headers_have(search.path, search.value)
        else:
            return rows
        return searching.newest(request, rows, self.age_column).filter(condition)

    def called(self, term: str) -> Q:
        """The messages that `term` names, by columns with an index."""
        raise NotImplementedError

    def badge_of(self, row: Any) -> SafeString:
        return badge(row.get_state_display(), self.tones.get(row.state, Tone.STOPPED))

    @admin.display(description=_("state"))
    def state_badge(self, row: Any) -> SafeString:
        return self.badge_of(row)

    @admin.display(description=_("topic"))
    def topic_name(self, row: Any) -> SafeString:
        return identifier(row.topic)

    @admin.display(description=_("biz-id"))
    def biz_id_name(self, row: Any) -> SafeString:
        return identifier(row.biz_id)

    @admin.display(description=_("message id"))
    def message_id_name(self, row: Any) -> SafeString:
        return flow_link(row, row.message_id)

    @admin.display(description=_("ordering key"))
    def key_name(self, row: Any) -> SafeString:
        return identifier(row.key)

    @admin.display(description=_("correlation id"))
    def correlation_id_name(self, row: Any) -> SafeString:
        return flow_link(row, row.correlation_id)

    @admin.display(description=_("causation id"))
    def causation_id_name(self, row: Any) -> SafeString:
        return flow_link(row, row.causation_id)

    @admin.display(description=_("traceparent"))
    def traceparent_name(self, row: Any) -> SafeString:
        return identifier(row.traceparent)

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Without the optional fields that have no value."""
        parts = super().get_fieldsets(request, obj)
        if obj is None:
            return parts
        shown = [(title, self._with_value(options["fields"], obj)) for title, options in parts]
        return [(title, {"fields": fields}) for title, fields in shown if fields]

    def _with_value(self, fields: Any, row: Any) -> list[str]:
        return [name for name in fields if name not in self.optional or strip_tags(getattr(self, name)(row)) != NOTHING]

    @admin.display(description=_("last error"))
    def error_headline(self, row: Any) -> SafeString:
        return headline(row.last_error)

    def attempts_line(self, row: Any) -> SafeString:
        """In the list; empty before the first attempt."""
        words = ngettext("%(count)s attempt", "%(count)s attempts", row.attempts)
        return format_html('<span class="message-quiet">{}</span>', words if row.attempts else "")

    @admin.display(description=_("last error"))
    def error_text(self, row: Any) -> SafeString:
        return as_text(row.last_error).as_html()

    @admin.display(description=_("headers"))
    def headers_text(self, row: Any) -> SafeString:
        if row.headers == {}:
            return format_html("{}", NOTHING)
        return as_json(self.redaction().headers(row.headers)).as_html()

    @admin.display(description=_("created"))
    def created(self, row: Any) -> SafeString:
        return moment(row.created_at, row.database_now)

    @admin.display(description=_("settled"))
    def settled(self, row: Any) -> SafeString:
        return moment(row.settled_at, row.database_now)

    def is_here(self, where: str) -> bool:
        """Does a moment with this `where` belong to this app?"""
        raise NotImplementedError

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any) -> HttpResponse:
        row: Any = kwargs.get("obj")
        if row is not None and row.message_id:
            if request.user.has_perm(f"{self.opts.app_label}.view_trailentry"):
                context["life"] = self._timeline(request, row)
            context["counterpart"] = self.counterpart
            context["counterpart_url"] = self._counterpart_url(request, str(row.message_id))
        return super().render_change_form(request, context, *args, **kwargs)

    def _timeline(self, request: HttpRequest, row: Any) -> SafeString:
        may_see_all = request.user.has_perms([self.counterpart.permission, self.counterpart.trail_permission])
        return timeline(
            life_of(str(row.message_id)),
            lambda where: may_see_all or self.is_here(where),
            partial(flow_link, row),
            gettext("Users with the permission to view %(what)s see more of its history here.")
            % {"what": self.counterpart.title},
        )

    def _counterpart_url(self, request: HttpRequest, message_id: str) -> str:
        """The URL of the other app's rows of this message; "" if this site does not have them or the user may not view them."""
        if not request.user.has_perm(self.counterpart.permission):
            return ""
        try:
            return f"{reverse(f'{self.admin_site.name}:{self.counterpart.changelist}')}?{urlencode({'q': message_id})}"
        except NoReverseMatch:
            return ""

    def offers(self, action: str, row: Any) -> bool:
        return row.state in self.allowed_in.get(action, ())

    def has_export_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.export_{self.letters.app}message")

    @admin.action(permissions=["export"], description=_("Export dead letters"))
    def export(self, request: HttpRequest, queryset: QuerySet[Any]) -> Any:
        """A file with the dead letters among the selected messages, of any number: see `dead_letters`."""
        rows = queryset.filter(state__in=self.allowed_in["export"])
        total = rows.count()
        if not total:
            self.message_user(request, gettext("Nothing was exported: none of the messages is a dead letter."), messages.ERROR)
            return None
        if request.POST.get("select_across") == "1":
            subjects = [Subject(kind="messages", name=self.selection_text(request))]
        else:
            subjects = [Subject(kind=self.kind, id=self.audited_id(row), name=self.subject(row)) for row in rows]
        record(self.package, queryset.db, actor_of(request), "export", subjects, {"messages": total})
        response = StreamingHttpResponse(self.letters.lines(rows), content_type="application/jsonl; charset=utf-8")
        response["Content-Disposition"] = f'attachment; filename="{self.opts.app_label}-dead-letters.jsonl"'
        response["Cache-Control"] = "no-store"
        return response

    def why_not(self, request: HttpRequest, alias: str, pk: int) -> str:
        row = self.everything(request).using(alias).filter(pk=pk).only("state").first()
        if row is None:
            return gettext("it no longer exists")
        allowed = row.state in self.allowed_in.get(request.POST.get("action", ""), ())
        state = row.get_state_display().lower()
        if allowed:
            return gettext("it is %(state)s now, and a process is working on it; try again") % {"state": state}
        return gettext("it is %(state)s now") % {"state": state}
