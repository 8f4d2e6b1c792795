"""Actions on the rows of admin pages.

An action is one guarded change per row. It finds the selected rows by primary key, not through the list's filter: a message
that was published meanwhile no longer matches the filter, and the operator must see it. A change and its entries in the admin's
log and in the audit log (`operators.audit`) commit together.

This module contains no model: its subclasses declare theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.actions import Action, ActionForm
from exactly_once.console.admin.pages import BoundedPaginator, LeanChangeList, ReadOnlyAdmin
from exactly_once.console.admin.planning import plan
from exactly_once.console.display import number, visible
from exactly_once.console.operators.audit import Subject, actor_of, posted, record
from exactly_once.console.operators.changes import DELETED
from exactly_once.sql.connections import decision_transaction
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.operation_rows import Given, RowOutcome
from exactly_once.wire.text import fit

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise

_NO_FILTERS = {"o", "p", "all", "_changelist_filters"}


class ActingAdmin(ReadOnlyAdmin):
    """Read-only rows with actions."""

    kind: ClassVar[str] = "message"
    """What the audit log calls a row, in every language."""
    noun: ClassVar[StrOrPromise] = _("message")
    nouns: ClassVar[StrOrPromise] = _("messages")
    large_columns: ClassVar[Sequence[str]] = ()
    refusals: ClassVar[tuple[type[Exception], ...]] = ()
    """Exceptions with which a transition reports that it was refused; it is rolled back."""
    nothing: ClassVar[Any]
    """The text of an empty list."""
    hint: ClassVar[Any] = ""
    """An explanation of the list's order and columns."""
    adds: ClassVar[Action | None] = None
    """The action that makes a row. It has a form, and no row."""
    named_by: ClassVar[str] = "pk"
    """The column that the form of `adds` fills in, and that is unique."""

    ACTION_LIMIT: ClassVar[int] = 500
    """Maximum rows of one action: each row has its own transaction, and the operator waits for the page."""
    LINE_LIMIT: ClassVar[int] = 20
    """Maximum rows that are reported one by one."""

    change_form_template = "exactly_once/message.html"
    change_list_template = "exactly_once/messages.html"
    list_per_page = 50
    sortable_by: ClassVar[Any] = ()
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = BoundedPaginator

    def subject(self, row: Any) -> str:
        """The name of a row in a report."""
        return visible(str(row))

    def badge_of(self, row: Any) -> SafeString:
        raise NotImplementedError

    @admin.display(description=_("state"))
    def state_badge(self, row: Any) -> SafeString:
        return self.badge_of(row)

    def explanation(self, row: Any) -> SafeString | str:
        """Why the row is in its state, for its page."""
        return ""

    @admin.display(description=_("state"))
    def state_explained(self, row: Any) -> SafeString:
        return format_html("{}{}", self.badge_of(row), self.explanation(row))

    def remark(self, action: Action, row: Any) -> SafeString | str:
        """The effect of the action on the row, where it is not obvious."""
        return "" if action.is_offered(row) else gettext("In this state it is not changed.")

    def permits(self, request: HttpRequest, action: Action, row: Any = None) -> bool:
        """May the user do it to this row, or to some row?"""
        return action.may(request.user, row) if action.may else request.user.has_perm(action.codename(self.model))

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> Any:
        """Those that the user has the permission for. A project may have added others to its site, as functions.

        Args:
            action_location: given from Django 6.1 on.
        """
        found: Any = super().get_actions(request, *([] if action_location is None else [action_location]))
        return {
            name: each
            for name, each in found.items()
            if not isinstance(action := _function(each), Action) or self.permits(request, action)
        }

    def permitted(self, request: HttpRequest) -> dict[str, Action]:
        """The declared actions that the user has the permission for, by name."""
        functions = {name: _function(each) for name, each in self.get_actions(request).items()}
        return {name: action for name, action in functions.items() if isinstance(action, Action)}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows: QuerySet[Any] = super().get_queryset(request).using(self.using).annotate(database_now=DatabaseTime())
        return rows

    def called(self, term: str) -> Q:
        """The rows that a search finds."""
        return Q()

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[QuerySet[Any], bool]:
        term = fit(search_term.strip())
        return (queryset.filter(self.called(term)) if term else queryset), False

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return LeanChangeList

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Allow only the filters' own parameters: another lookup, typed into the URL, could scan millions of rows."""
        filters: Any = self.list_filter
        return lookup in {one.parameter_name for one in filters}

    def warnings(self, request: HttpRequest) -> Sequence[SafeString]:
        """Warnings above the list."""
        return ()

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        context = {
            "title": capfirst(self.opts.verbose_name_plural),
            "nothing": self.nothing,
            "hint": self.hint,
            "warnings": () if request.method == "POST" else self.warnings(request),
            "adds": self.adds,
        }
        return super().changelist_view(request, {**context, **(extra_context or {})})

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any) -> HttpResponse:
        row: Any = kwargs.get("obj")
        actions = self.permitted(request).values()
        context["message_actions"] = [each for each in actions if each.is_offered(row) and self.permits(request, each, row)]
        context["changelist_url"] = self.changelist_url
        context["action_checkbox_name"] = ACTION_CHECKBOX_NAME
        return super().render_change_form(request, context, *args, **kwargs)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return self.adds is not None and self.permits(request, self.adds)

    def add_view(self, request: HttpRequest, form_url: str = "", extra_context: Any = None) -> HttpResponse:
        """Ask for what `adds` needs, and make the row."""
        action = self.adds
        if action is None or action.form is None or not self.permits(request, action):
            raise PermissionDenied
        form = action.form(request.POST or None, alias=self.using, initial=request.GET.dict())
        if not form.is_valid():
            return self._ask(request, action, {}, form)
        with decision_transaction(self.using):
            action.perform(self.using, [None], _given(request, form))
            row = self.get_queryset(request).get(**{self.named_by: form.cleaned_data[self.named_by]})
            self.log_addition(request, row, [{"added": {}}])
            self.audit(request, self.using, action.name, row)
        self._report(request, str(action.done), [RowOutcome(row.pk, self.subject(row))])
        return HttpResponseRedirect(
            self.changelist_url if self.has_view_permission(request) else reverse(f"{self.admin_site.name}:index")
        )

    def response_action(self, request: HttpRequest, queryset: QuerySet[Any], *args: Any, **kwargs: Any) -> HttpResponse | None:
        """On all matching rows, plan an operation, if the action can be one."""
        action = self.permitted(request).get(request.POST.get("action", ""))
        if action and action.is_operation and request.POST.get("select_across") == "1":
            return plan(self, request, queryset, action, self.selection_text(request), request.get_full_path())
        return super().response_action(request, queryset, *args, **kwargs)

    def selection_text(self, request: HttpRequest) -> str:
        """What "all matching" are, for people: the search and the filters."""
        given = [f"{name} {value}" for name, value in request.GET.items() if value and name not in _NO_FILTERS]
        return visible(_("all messages with %s") % ", ".join(given)) if given else str(_("all messages"))

    def take(self, action: Action, request: HttpRequest, queryset: QuerySet[Any]) -> Any:
        """Ask, if the action asks, and carry it out on the selected rows once the operator has confirmed it."""
        given = _given(request)
        if action.respond and not action.question:
            return action.respond(self, request, queryset, given)
        picked = self._picked(request, queryset, action)
        if picked is None:
            return None
        rows = [row for row in picked.values() if row is not None]
        is_confirmed, form = request.POST.get("confirmed") == "yes", None
        if action.form:
            try:
                form = action.form(request.POST if is_confirmed else None, rows=rows, alias=queryset.db)
            except self.refusals as error:
                refused = RowOutcome(rows[0].pk, self.subject(rows[0]), visible(str(error)), is_error=True)
                self._report(request, str(action.done), [refused])
                return self._back(request, queryset, picked)
        if action.question and not (is_confirmed and (form is None or form.is_valid())):
            return self._ask(request, action, picked, form)
        given = _given(request, form)
        if action.respond:
            return action.respond(self, request, rows, given)
        done = str((form and form.done) or action.done)
        outcomes = [self._outcome(request, queryset.db, pk, row, action, given, done) for pk, row in picked.items()]
        self._report(request, done, outcomes)
        return self._back(request, queryset, picked)

    def _back(self, request: HttpRequest, queryset: QuerySet[Any], picked: Mapping[Any, Any]) -> HttpResponse | None:
        """To the row's own page, if the action was chosen there and the row still exists."""
        if request.POST.get("own_page") and self.get_queryset(request).using(queryset.db).filter(pk__in=picked).count() == 1:
            return HttpResponseRedirect(self.own_url(next(iter(picked))))
        return None

    def _ask(self, request: HttpRequest, action: Action, picked: Mapping[Any, Any], form: ActionForm | None) -> HttpResponse:
        """The confirmation page, with all rows that the action will act on."""
        rows = [row for row in picked.values() if row is not None]
        context = {
            "title": (form and form.question) or action.question,
            "rows": [(row, self.badge_of(row), self.subject(row), self.remark(action, row)) for row in rows],
            "noun": self.noun,
            "applies": sum(action.is_offered(row) for row in rows),
            "selected": len(picked),
            "action": action.name,
            "button": (form and form.button) or action.button or action.label,
            "adds": action is self.adds,
            "form": form,
            "own_page": request.POST.get("own_page", ""),
            "changelist_url": self.changelist_url,
            "action_checkbox_name": ACTION_CHECKBOX_NAME,
        }
        return self.respond(request, "exactly_once/confirm.html", context)

    def _picked(self, request: HttpRequest, queryset: QuerySet[Any], action: Action) -> dict[Any, Any] | None:
        """The selected rows by primary key, in its order; None for a row that no longer exists. None if they are too many."""
        if request.POST.get("select_across") == "1":
            keys = list(queryset.order_by("pk").values_list("pk", flat=True)[: self.ACTION_LIMIT + 1])
        else:
            given = {self.opts.pk.to_python(key) for key in request.POST.getlist(ACTION_CHECKBOX_NAME)}
            keys = sorted(given)[: self.ACTION_LIMIT + 1]
        if len(keys) > self.ACTION_LIMIT:
            words = gettext(
                "Nothing was changed: the limit is %(limit)s %(nouns)s at a time. Narrow the list, or use a command "
                "(python manage.py help)."
            )
            self.message_user(request, words % {"limit": self.ACTION_LIMIT, "nouns": self.nouns}, messages.ERROR)
            return None
        fresh = self.get_queryset(request).using(queryset.db).defer(*self.large_columns)
        found = {row.pk: row for row in fresh.filter(pk__in=keys)}
        if action.is_single and (len(keys) != 1 or not found):
            words = gettext("Nothing was changed: select one %(noun)s.") % {"noun": self.noun}
            self.message_user(request, words, messages.ERROR)
            return None
        return {key: found.get(key) for key in keys}

    def _outcome(
        self, request: HttpRequest, alias: str, pk: Any, row: Any, action: Action, given: Given, done: str
    ) -> RowOutcome:
        if row is None:
            return RowOutcome(pk, gettext("number %(number)s") % {"number": pk}, str(DELETED))
        subject = self.subject(row)
        if not self.permits(request, action, row):
            return RowOutcome(pk, subject, gettext("you do not have the permission for it"), is_error=True)
        try:
            with decision_transaction(alias):
                (outcome,) = action.perform(alias, [pk], given)
                if not outcome.unchanged:
                    self.log_change(request, row, f"{capfirst(done)}: {given.reason}" if given.reason else f"{capfirst(done)}.")
                    self.audit(request, alias, action.name, row)
            return outcome._replace(name=subject, unchanged=visible(outcome.unchanged))
        except DatabaseError as error:
            # The rows before this one are committed, so the operator must get a report, not an error page.
            failed = visible(gettext("the database reported %(error)s") % {"error": error})
            return RowOutcome(pk, subject, failed, is_error=True)
        except self.refusals as error:
            return RowOutcome(pk, subject, visible(str(error)), is_error=True)

    def audit(self, request: HttpRequest, alias: str, action: str, row: Any) -> None:
        """Write the action into the audit log, in the open transaction."""
        subject = Subject(kind=self.kind, id=self.audited_id(row), name=self.subject(row))
        record(getattr(row, "app", self.package), alias, actor_of(request), action, [subject], self.parameters(request))

    def parameters(self, request: HttpRequest) -> dict[str, Any]:
        """What the audit log keeps of the operator's input."""
        return posted(request)

    def audited_id(self, row: Any) -> str:
        """The id by which the audit log names a row."""
        return str(getattr(row, self.named_by))

    def _report(self, request: HttpRequest, done: str, outcomes: Sequence[RowOutcome]) -> None:
        failures = [outcome for outcome in outcomes if outcome.unchanged]
        if len(outcomes) > self.LINE_LIMIT:
            if succeeded := len(outcomes) - len(failures):
                counts = {"succeeded": number(succeeded), "all": number(len(outcomes)), "nouns": self.nouns, "done": done}
                words = gettext("%(succeeded)s of %(all)s %(nouns)s %(done)s.") % counts
                self.message_user(request, words, messages.SUCCESS)
            if failures:
                reasons = Counter(failure.unchanged for failure in failures).most_common(self.LINE_LIMIT)
                listed = "; ".join(f"{number(count)}: {reason}" for reason, count in reasons)
                words = gettext("%(count)s not %(done)s. %(reasons)s.")
                counts = {"count": number(len(failures)), "done": done, "reasons": listed}
                self.message_user(request, words % counts, messages.WARNING)
            outcomes = failures[: self.LINE_LIMIT // 2]
        for outcome in outcomes:
            # The noun comes first, because the admin capitalises the first letter, and ids must be copied unchanged.
            level, words = messages.SUCCESS, "%(noun)s %(subject)s: %(done)s"
            if outcome.unchanged:
                level = messages.ERROR if outcome.is_error else messages.WARNING
                words = gettext("%(noun)s %(subject)s: not %(done)s: %(reason)s")
            told = {"noun": capfirst(self.noun), "subject": outcome.name, "done": done, "reason": outcome.unchanged}
            self.message_user(request, words % told, level)

    @property
    def changelist_url(self) -> str:
        return reverse(f"{self.admin_site.name}:{self.opts.app_label}_{self.opts.model_name}_changelist")

    def own_url(self, pk: Any) -> str:
        return reverse(f"{self.admin_site.name}:{self.opts.app_label}_{self.opts.model_name}_change", args=[pk])


def _function(action: Any) -> Any:
    """The function of one of the admin's actions, which is a tuple before Django 6.1."""
    return action[0] if isinstance(action, tuple) else action.func


def _given(request: HttpRequest, form: ActionForm | None = None) -> Given:
    """Who acts, and what a valid form says."""
    user: Any = request.user
    values = dict(form.cleaned_data) if form else {}
    return Given(user=user.get_username(), reason=values.pop("reason", ""), values=values)
