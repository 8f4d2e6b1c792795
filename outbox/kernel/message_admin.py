"""What both sides' admin pages have in common: reading messages, and acting on them.

An action is one guarded transition per message. What was picked is looked up again by primary key, never through the
list's filter: a message that was published meanwhile has left the filter, and the operator must be told. A transition
and its entry in the admin's log commit together.

This module knows no model: `MessageAdmin` is told everything by its subclass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db import DEFAULT_DB_ALIAS, DatabaseError, transaction
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.html import format_html
from django.utils.safestring import SafeString

from outbox.kernel.clock import DatabaseTime
from outbox.kernel.text import fit, why_unfit

if TYPE_CHECKING:
    from django.forms import Form

    _ModelAdmin = admin.ModelAdmin[Any]
    _Paginator = Paginator[Any]
else:
    _ModelAdmin = admin.ModelAdmin
    _Paginator = Paginator
from outbox.kernel.display import NOTHING, Tone, as_json, as_text, badge, headline, identifier, moment, span, visible


class BoundedPaginator(_Paginator):
    """Counts no further than anybody pages: counting millions of rows takes longer than people wait."""

    LIMIT = 10_000

    @cached_property
    def _counted(self) -> int:
        rows: Any = self.object_list
        counted: int = rows.order_by().values("pk")[: self.LIMIT + 1].count()
        return counted

    @property
    def count(self) -> int:
        return min(self._counted, self.LIMIT)

    @property
    def is_cut(self) -> bool:
        """Are there more than are counted?"""
        return self._counted > self.LIMIT


def counted(rows: QuerySet[Any]) -> str:
    """How many rows there are, as far as anybody counts them: "10,000+"."""
    counter = BoundedPaginator(rows.order_by("pk"), 1)
    return f"{counter.count:,}+" if counter.is_cut else f"{counter.count:,}"


class MessageChangeList(ChangeList):
    """The list, which leaves the large columns in the database."""

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        model_admin: Any = self.model_admin
        return super().get_queryset(request, exclude_parameters).defer(*model_admin.large_columns)


class StateFilter(admin.SimpleListFilter):
    """By state; a value that is none filters nothing."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        """Every state with its count, which stops where the list's does."""
        rows = model_admin.get_queryset(request)
        return [
            (state, f"{label} ({counted(rows.filter(state=state))})")
            for state, label in model_admin.opts.get_field("state").choices
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        known = {state for state, _ in self.lookup_choices}
        return queryset.filter(state=self.value()) if self.value() in known else queryset


class StuckFilter(admin.SimpleListFilter):
    """What does not go on by itself, or not in time."""

    title = "stuck"
    parameter_name = "stuck"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        return [("any", "Dead, retrying or overdue"), ("overdue", f"Overdue by {span(model_admin.stuck_after())}")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one picked message.

    Attributes:
        subject: what the operator knows it by.
        failed: why nothing was done; "" when it was.
        is_error: it is nobody's state that stood in the way, but a database that failed.
    """

    subject: str
    failed: str = ""
    is_error: bool = False


class ReadOnlyAdmin(_ModelAdmin):
    """Rows to be read, never to be added, changed or deleted.

    Set `using` in a subclass to show another database than the default one.
    """

    using: ClassVar[str] = DEFAULT_DB_ALIAS
    view_on_site = False

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class MessageAdmin(ReadOnlyAdmin):
    """Messages to be read and acted on."""

    tones: ClassVar[Mapping[str, Tone]]
    large_columns: ClassVar[Sequence[str]] = ("body", "headers")
    allowed_in: ClassVar[Mapping[str, Sequence[str]]]
    """By action: the states from which it is offered on a message's own page."""
    confirmation_template: ClassVar[str]
    refusals: ClassVar[tuple[type[Exception], ...]] = ()
    """What a transition may raise to say why it could not be made; it is rolled back."""

    ACTION_LIMIT: ClassVar[int] = 500
    """Most messages of one action: every one is a transaction of its own, and somebody waits for the page."""
    LINE_LIMIT: ClassVar[int] = 20
    """Most messages that are reported one by one."""

    ordering = ("-id",)
    sortable_by = ("age",)  # Anything else would sort the whole table.
    list_per_page = 50
    search_fields = ("message_id",)  # Makes the search box appear; get_search_results() reads it.
    search_help_text = "A message id, biz-id or topic, exactly; with * at the end: everything that begins so (slower)."
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = BoundedPaginator

    def stuck_after(self) -> timedelta:
        raise NotImplementedError

    def subject(self, row: Any) -> str:
        """How a message is called in a report."""
        return visible(f"{row.message_id} ({row.topic} {row.biz_id})")

    # reading

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows: QuerySet[Any] = super().get_queryset(request).using(self.using).annotate(database_now=DatabaseTime())
        return rows

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return MessageChangeList

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """The filters' own parameters. A lookup on any column, typed into the address, could scan millions of rows."""
        filters: Any = self.list_filter
        return lookup in {one.parameter_name for one in filters}

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
        return badge(row.get_state_display(), self.tones[row.state])

    @admin.display(description="state")
    def state_badge(self, row: Any) -> SafeString:
        return self.badge_of(row)

    @admin.display(description="topic")
    def topic_name(self, row: Any) -> SafeString:
        return identifier(row.topic)

    @admin.display(description="biz-id")
    def biz_id_name(self, row: Any) -> SafeString:
        return identifier(row.biz_id)

    @admin.display(description="message id")
    def message_id_name(self, row: Any) -> SafeString:
        return identifier(str(row.message_id))

    @admin.display(description="ordering key")
    def key_name(self, row: Any) -> SafeString:
        return identifier(row.key)

    @admin.display(description="correlation id")
    def correlation_id_name(self, row: Any) -> SafeString:
        return identifier(row.correlation_id)

    @admin.display(description="causation id")
    def causation_id_name(self, row: Any) -> SafeString:
        return identifier(row.causation_id)

    @admin.display(description="traceparent")
    def traceparent_name(self, row: Any) -> SafeString:
        return identifier(row.traceparent)

    @admin.display(description="last error")
    def error_headline(self, row: Any) -> SafeString:
        return headline(row.last_error)

    @admin.display(description="last error")
    def error_text(self, row: Any) -> SafeString:
        return as_text(row.last_error).as_html()

    @admin.display(description="headers")
    def headers_text(self, row: Any) -> SafeString:
        return as_json(row.headers).as_html() if row.headers else format_html("{}", NOTHING)

    @admin.display(description="created")
    def created(self, row: Any) -> SafeString:
        return moment(row.created_at, row.database_now)

    @admin.display(description="settled")
    def settled(self, row: Any) -> SafeString:
        return moment(row.settled_at, row.database_now)

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any) -> HttpResponse:
        row: Any = kwargs.get("obj")
        offered: Mapping[str, Any] = self.get_actions(request)
        context["message_actions"] = [
            (action, description) for _, action, description in offered.values() if row is not None and self.offers(action, row)
        ]
        context["changelist_url"] = self._changelist_url()
        context["action_checkbox_name"] = ACTION_CHECKBOX_NAME
        return super().render_change_form(request, context, *args, **kwargs)

    def offers(self, action: str, row: Any) -> bool:
        """Is this action to be had on the message's own page?"""
        return row.state in self.allowed_in.get(action, ())

    # acting

    def is_confirmed(self, request: HttpRequest) -> bool:
        return request.POST.get("confirmed") == "yes"

    def ask(
        self,
        request: HttpRequest,
        queryset: QuerySet[Any],
        *,
        action: str,
        question: str,
        button: str,
        form: Form | None = None,
    ) -> HttpResponse | None:
        """The page between an action and its being carried out, with everything it will act on."""
        picked = self._picked(request, queryset)
        if picked is None:
            return None
        context = {
            **self.admin_site.each_context(request),
            "title": question,
            "opts": self.opts,
            "media": self.media,
            "rows": [(row, self.badge_of(row), self.subject(row)) for row in picked.values() if row is not None],
            "action": action,
            "button": button,
            "form": form,
            "own_page": request.POST.get("own_page", ""),
            "changelist_url": self._changelist_url(),
            "action_checkbox_name": ACTION_CHECKBOX_NAME,
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, self.confirmation_template, context)

    def carry_out(
        self,
        request: HttpRequest,
        queryset: QuerySet[Any],
        *,
        done: str,
        transition: Callable[[str, int], bool],
        reason: str = "",
    ) -> HttpResponse | None:
        """Try the transition on each picked message and say what happened to each.

        Args:
            done: the past participle of what is done, "requeued".
            transition: guarded; takes the database alias and the primary key, False when the state does not allow it.
            reason: the operator's, for the log.
        """
        picked = self._picked(request, queryset)
        if picked is None:
            return None
        entry = f"{done.capitalize()}: {reason}" if reason else f"{done.capitalize()}."
        outcomes = [self._carry_out_one(request, queryset.db, pk, row, transition, entry) for pk, row in picked.items()]
        self._report(request, done, outcomes)
        if request.POST.get("own_page") and len(picked) == 1:
            return HttpResponseRedirect(self.own_url(next(iter(picked))))
        return None

    def _picked(self, request: HttpRequest, queryset: QuerySet[Any]) -> dict[int, Any] | None:
        """By primary key and in its order, None for a row that is gone; None altogether when it is too much."""
        if request.POST.get("select_across") == "1":
            rows = list(queryset.order_by("pk")[: self.ACTION_LIMIT + 1])
            picked = {row.pk: row for row in rows}
        else:
            keys = sorted({int(key) for key in request.POST.getlist(ACTION_CHECKBOX_NAME)})[: self.ACTION_LIMIT + 1]
            fresh = self.get_queryset(request).using(queryset.db).defer(*self.large_columns)
            found = {row.pk: row for row in fresh.filter(pk__in=keys)}
            picked = {key: found.get(key) for key in keys}
        if len(picked) <= self.ACTION_LIMIT:
            return picked
        words = (
            f"Nothing was done: these are more than {self.ACTION_LIMIT} messages. Narrow the list, or use a command "
            "(python manage.py help)."
        )
        self.message_user(request, words, messages.ERROR)
        return None

    def _carry_out_one(
        self,
        request: HttpRequest,
        alias: str,
        pk: int,
        row: Any,
        transition: Callable[[str, int], bool],
        entry: str,
    ) -> Outcome:
        if row is None:
            return Outcome(subject=f"number {pk}", failed="it is gone")
        subject = self.subject(row)
        try:
            with transaction.atomic(using=alias):
                if transition(alias, pk):
                    self.log_change(request, row, entry)
                    return Outcome(subject=subject)
            return Outcome(subject=subject, failed=self.why_not(request, alias, pk))
        except DatabaseError as error:
            # The rows before this one are done, so the operator must get a report and not an error page.
            return Outcome(subject=subject, failed=visible(f"the database said {error}".strip()), is_error=True)
        except self.refusals as error:
            return Outcome(subject=subject, failed=visible(str(error)), is_error=True)

    def why_not(self, request: HttpRequest, alias: str, pk: int) -> str:
        """Why the action that was asked for did nothing to this message."""
        row = self.get_queryset(request).using(alias).filter(pk=pk).only("state").first()
        if row is None:
            return "it is gone"
        states = {state for states in self.allowed_in.values() for state in states}
        in_hand = ", and somebody has it in hand; try again" if row.state in states else ""
        return f"it is {row.get_state_display().lower()} now{in_hand}"

    def _report(self, request: HttpRequest, done: str, outcomes: Sequence[Outcome]) -> None:
        failures = [outcome for outcome in outcomes if outcome.failed]
        if len(outcomes) > self.LINE_LIMIT:
            if succeeded := len(outcomes) - len(failures):
                self.message_user(request, f"{succeeded:,} of {len(outcomes):,} messages {done}.", messages.SUCCESS)
            if failures:
                reasons = Counter(failure.failed for failure in failures).most_common()
                words = "; ".join(f"{count:,}: {reason}" for reason, count in reasons[: self.LINE_LIMIT])
                self.message_user(request, f"{len(failures):,} not {done}. {words}.", messages.WARNING)
            outcomes = failures[: self.LINE_LIMIT // 2]
        for outcome in outcomes:
            # "Message" first, because the admin capitalises the first letter, and an id is to be copied.
            if outcome.failed:
                level = messages.ERROR if outcome.is_error else messages.WARNING
                self.message_user(request, f"Message {outcome.subject}: not {done}: {outcome.failed}", level)
            else:
                self.message_user(request, f"Message {outcome.subject}: {done}", messages.SUCCESS)

    def _changelist_url(self) -> str:
        return reverse(f"{self.admin_site.name}:{self.opts.app_label}_{self.opts.model_name}_changelist")

    def own_url(self, pk: int) -> str:
        return reverse(f"{self.admin_site.name}:{self.opts.app_label}_{self.opts.model_name}_change", args=[pk])
