"""Admin pages of messages, shared by both apps: searching messages and showing their content.

This module contains no model: its subclasses declare theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from outbox.console.acting_admin import ActingAdmin, counted
from outbox.console.audit import Subject, actor_of, record
from outbox.console.dead_letters import Letters
from outbox.console.display import NOTHING, Tone, as_json, as_text, badge, duration, headline, identifier, moment, visible
from outbox.console.timeline import timeline
from outbox.console.trail import life_of
from outbox.kernel.text import fit, why_unfit


class StateFilter(admin.SimpleListFilter):
    """By state; an unknown value is ignored."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        """Every state with its count, which has the same limit as the list's."""
        rows = model_admin.get_queryset(request)
        return [(state, f"{label} ({counted(self.of(rows, state))})") for state, label in self.states(model_admin)]

    def states(self, model_admin: Any) -> list[tuple[str, str]]:
        return list(model_admin.opts.get_field("state").choices)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        known = {state for state, _ in self.lookup_choices}
        value = self.value()
        return self.of(queryset, value) if value in known else queryset

    def of(self, queryset: QuerySet[Any], state: str) -> QuerySet[Any]:
        return queryset.filter(state=state)


class StuckFilter(admin.SimpleListFilter):
    """Messages that failed or are overdue."""

    title = _("stuck")
    parameter_name = "stuck"
    words: ClassVar[Any] = _("Dead, retrying or overdue")
    failing: ClassVar[Sequence[str]]

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        return [
            ("any", self.words),
            ("overdue", gettext("Overdue by %(time)s") % {"time": duration(model_admin.stuck_after())}),
        ]

    def overdue(self) -> Q:
        raise NotImplementedError

    def failed(self) -> Q:
        return Q(state__in=self.failing)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        match self.value():
            case "any":
                return queryset.filter(self.failed() | self.overdue())
            case "overdue":
                return queryset.filter(self.overdue())
            case _:
                return queryset


@dataclass(frozen=True, kw_only=True)
class Counterpart:
    """The other app's page of the same message.

    Attributes:
        changelist: the list's name in an admin site.
        title: of that list.
        permission: required to see the other app's data, also where this app shows it.
    """

    changelist: str
    title: Any
    permission: str


class MessageAdmin(ActingAdmin):
    """Read-only messages with actions."""

    counterpart: ClassVar[Counterpart]
    tones: ClassVar[Mapping[str, Tone]]
    large_columns: ClassVar[Sequence[str]] = ("body", "headers")
    nothing = _("No messages.")
    allowed_in: ClassVar[Mapping[str, Sequence[str]]]
    """By action: the states from which it is allowed."""
    letters: ClassVar[Letters]

    ordering: ClassVar[Any] = ("-id",)
    sortable_by: ClassVar[Any] = ("age",)  # Anything else would sort the whole table.
    search_fields = ("message_id",)  # Makes the search box appear; get_search_results() reads it.
    search_help_text = _("An exact message id, biz-id or topic. With a * at the end: a prefix of a topic or biz-id (slower).")

    def stuck_after(self) -> timedelta:
        raise NotImplementedError

    def subject(self, row: Any) -> str:
        """The name of a message in a report."""
        return visible(f"{row.message_id} ({row.topic} {row.biz_id})")

    def audited_id(self, row: Any) -> str:
        return str(row.message_id)

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[QuerySet[Any], bool]:
        term = search_term.strip()
        if not term:
            return queryset, False
        if not term.endswith("*"):
            return queryset.filter(self.called(fit(term))), False
        beginning = term.rstrip("*")
        if not beginning or why_unfit(beginning):
            return queryset.none(), False
        return queryset.filter(Q(topic__startswith=beginning) | Q(biz_id__startswith=beginning)), False

    def called(self, term: str) -> Q:
        """The messages that `term` names, by columns with an index."""
        return Q(topic=term) | Q(biz_id=term)

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
        return identifier(str(row.message_id))

    @admin.display(description=_("ordering key"))
    def key_name(self, row: Any) -> SafeString:
        return identifier(row.key)

    @admin.display(description=_("correlation id"))
    def correlation_id_name(self, row: Any) -> SafeString:
        return identifier(row.correlation_id)

    @admin.display(description=_("causation id"))
    def causation_id_name(self, row: Any) -> SafeString:
        return identifier(row.causation_id)

    @admin.display(description=_("traceparent"))
    def traceparent_name(self, row: Any) -> SafeString:
        return identifier(row.traceparent)

    @admin.display(description=_("last error"))
    def error_headline(self, row: Any) -> SafeString:
        return headline(row.last_error)

    @admin.display(description=_("last error"))
    def error_text(self, row: Any) -> SafeString:
        return as_text(row.last_error).as_html()

    @admin.display(description=_("headers"))
    def headers_text(self, row: Any) -> SafeString:
        return as_json(row.headers).as_html() if row.headers != {} else format_html("{}", NOTHING)

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
            context["life"] = self._timeline(request, str(row.message_id))
            context["counterpart"] = self.counterpart
            context["counterpart_url"] = self._counterpart_url(request, str(row.message_id))
        return super().render_change_form(request, context, *args, **kwargs)

    def _timeline(self, request: HttpRequest, message_id: str) -> SafeString:
        may_see_all = request.user.has_perm(self.counterpart.permission)
        return timeline(
            life_of(message_id),
            lambda where: may_see_all or self.is_here(where),
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
        return request.user.has_perm(f"{self.opts.app_label}.export_{self.opts.app_label}message")

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
        record(self.opts.app_label, queryset.db, actor_of(request), "export", subjects, {"messages": total})
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
