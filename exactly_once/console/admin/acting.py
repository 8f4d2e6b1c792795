"""Admin pages whose rows cannot be edited, and actions on these rows.

An action is one guarded transition per row. It finds the selected rows by primary key, not through the list's filter: a message
that was published meanwhile no longer matches the filter, and the operator must see it. A transition and its entries in the
admin's log and in the audit log (`operators.audit`) commit together.

This module contains no model: its subclasses declare theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import flatten_fieldsets, lookup_field
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db import DatabaseError, router
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, reverse
from django.utils.functional import cached_property
from django.utils.html import strip_tags
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.planning import plan
from exactly_once.console.display import NOTHING, number, visible
from exactly_once.console.operators.actions import Action, ActionForm, Given
from exactly_once.console.operators.audit import Subject, actor_of, posted, record
from exactly_once.sql.connections import decision_transaction, without_atomic_requests
from exactly_once.sql.labels import package_of
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.operation_rows import RowOutcome

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise


_CONFIRM = "exactly_once/confirm.html"
_EMPTY = {"", NOTHING, "None"}
"""What a field without a value shows."""
_NO_FILTERS = {"o", "p", "all", "_changelist_filters"}


class BoundedPaginator(Paginator):  # type: ignore[type-arg] # no generic at runtime
    """Counts up to a limit, because counting millions of rows takes too long."""

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
        """Are there more rows than were counted?"""
        return self._counted > self.LIMIT

    def page(self, number: int | str) -> Any:
        """The page. If not all rows match, those that do are found as they were counted, and then sorted.

        With ORDER BY and LIMIT, PostgreSQL expects the first matching rows near the end of the index that has the order. A few
        of the oldest of a million rows are at its other end.
        """
        name = self._sorted_by()
        if self.is_cut or name is None:
            return super().page(number)
        column, valid = name.removeprefix("-"), self.validate_number(number)
        rows: Any = self.object_list
        keys = sorted(rows.order_by().values_list(column, flat=True)[: self.LIMIT + 1], reverse=name.startswith("-"))
        first = (valid - 1) * self.per_page
        shown = rows.filter(**{f"{column}__in": keys[first : first + self.per_page]})
        return self._get_page(shown, valid, self)  # type: ignore[attr-defined] # documented as a hook, missing in the stubs

    def _sorted_by(self) -> str | None:
        """The first name in the order of filtered rows, if it is a unique column."""
        rows: Any = self.object_list
        name = next(iter(rows.query.order_by), None)
        if not rows.query.where or not isinstance(name, str):
            return None
        column = name.removeprefix("-")
        is_unique = column == "pk" or any(field.name == column and field.unique for field in rows.model._meta.concrete_fields)
        return name if is_unique else None


def counted(rows: QuerySet[Any]) -> str:
    """How many rows there are, up to the paginator's limit: "10,000+"."""
    counter = BoundedPaginator(rows.order_by("pk"), 1)
    return f"{number(counter.count)}+" if counter.is_cut else number(counter.count)


class _RowCount(int):
    """A number of rows as lists show it: "10,000+" where it was cut."""

    is_cut = False

    def __str__(self) -> str:
        return f"{number(int(self))}+" if self.is_cut else number(int(self))


class LeanChangeList(ChangeList):
    """A list that does not load the large columns."""

    def get_results(self, request: HttpRequest) -> None:
        if request.method == "POST":
            self.queryset = self.queryset.none()  # an action finds its rows by itself
        super().get_results(request)
        paginator: Any = self.paginator
        self.result_count = _RowCount(self.result_count)
        self.result_count.is_cut = paginator.is_cut

    @property
    def filter_bar(self) -> list[tuple[Any, list[Any], Any]]:
        """For the template: each filter's title, its choices, and the chosen one; None if that is the first, which is all."""
        bar = []
        for spec in self.filter_specs:
            choices: list[Any] = list(spec.choices(self))
            bar.append((spec.title, choices, next((each["display"] for each in choices[1:] if each["selected"]), None)))
        return bar

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        model_admin: Any = self.model_admin
        rows = super().get_queryset(request, exclude_parameters)
        self.has_filters = False  # otherwise a theme would show its own filters, too
        return rows.defer(*model_admin.large_columns)

    def url_for_result(self, result: Any) -> str:
        model_admin: Any = self.model_admin
        url: str = model_admin.own_url(result.pk)
        return url


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg] # no generic at runtime
    """Rows that cannot be added, changed or deleted.

    Set `using` in a subclass to show another database than the one that the database routers choose.
    """

    view_on_site = False

    class Media:
        """Our style sheet. A strict Content-Security-Policy blocks inline styles."""

        css: ClassVar[Any] = {"all": ["exactly_once/admin.css"]}

    always: ClassVar[Collection[str]] = ("state_explained", "payload")
    """Fields that always have a value. To ask for it takes time."""

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return flatten_fieldsets(self.fieldsets or ()) or self.fields or ()

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Those that have a value for this row."""
        parts = super().get_fieldsets(request, obj)
        shown = [(title, [name for name in part["fields"] if self._has_value(name, obj)]) for title, part in parts]
        return [(title, {"fields": fields}) for title, fields in shown if fields]

    def _has_value(self, name: Any, row: Any) -> bool:
        return row is None or name in self.always or strip_tags(str(lookup_field(name, row, self)[2])) not in _EMPTY

    def get_urls(self) -> list[URLPattern]:
        patterns: list[URLPattern] = super().get_urls()
        for pattern in patterns:
            pattern.callback = without_atomic_requests(pattern.callback)
        return patterns

    @property
    def using(self) -> str:
        return router.db_for_write(self.model)

    @property
    def package(self) -> str:
        """The half that the rows are about, "outbox" or "inbox", also for the models of its optional packages."""
        return package_of(self.model)

    def respond(self, request: HttpRequest, template: str, content: Mapping[str, Any]) -> HttpResponse:
        """A page of this site with this content."""
        request.current_app = self.admin_site.name
        title = capfirst(self.opts.verbose_name_plural)
        context = {**self.admin_site.each_context(request), "title": title, "opts": self.opts, "media": self.media}
        return TemplateResponse(request, template, {**context, **content})

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """The row for its page, with the address of the page that shows the flow of a message, see `display.flow_link`."""
        row: Any = super().get_object(request, object_id, from_field)
        if row is not None:
            row.flow_url = self.flow_url(request)
        return row

    def flow_url(self, request: HttpRequest) -> str:
        """The page of flows; "" if the user may not view it."""
        may_view = request.user.has_perm("exactly_once.view_flow")
        return reverse(f"{self.admin_site.name}:exactly_once_flow_changelist") if may_view else ""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


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

    def remark(self, action: Action, row: Any) -> SafeString | str:
        """The effect of the action on the row, where it is not obvious."""
        return "" if action.is_offered(row) else gettext("In this state it is not changed.")

    def state_of(self, row: Any) -> str:
        return str(row.get_state_display().lower())

    def why_not(self, action: Action, row: Any, given: Given) -> str:
        """Why the action did not change this row."""
        if words := action.why_not(row, given):
            return words
        state = {"state": self.state_of(row)}
        if action.sources and row.state in action.sources:
            return gettext("it is %(state)s now, and a process is working on it; try again") % state
        return gettext("it is %(state)s now") % state

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
            if action.run is not None:
                action.run(self.using, None, _given(request, form))
            row = self.get_queryset(request).get(**{self.named_by: form.cleaned_data[self.named_by]})
            self.log_addition(request, row, [{"added": {}}])
            self.audit(request, self.using, action.name, row)
        self._report(request, str(action.done), [RowOutcome(row.pk, self.subject(row))])
        return HttpResponseRedirect(self.changelist_url if self.has_view_permission(request) else reverse("admin:index"))

    def response_action(self, request: HttpRequest, queryset: QuerySet[Any], *args: Any, **kwargs: Any) -> HttpResponse | None:
        """On all matching rows, plan an operation, if the action can be one."""
        action = self.permitted(request).get(request.POST.get("action", ""))
        if action and action.perform and request.POST.get("select_across") == "1":
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
        outcomes = [self._carry_out_one(request, queryset.db, pk, row, action, given, done) for pk, row in picked.items()]
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
            "button": (form and form.button) or action.button,
            "adds": action is self.adds,
            "form": form,
            "own_page": request.POST.get("own_page", ""),
            "changelist_url": self.changelist_url,
            "action_checkbox_name": ACTION_CHECKBOX_NAME,
        }
        return self.respond(request, _CONFIRM, context)

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
            ) % {"limit": self.ACTION_LIMIT, "nouns": self.nouns}
            self.message_user(request, words, messages.ERROR)
            return None
        fresh = self.get_queryset(request).using(queryset.db).defer(*self.large_columns)
        found = {row.pk: row for row in fresh.filter(pk__in=keys)}
        if action.is_single and (len(keys) != 1 or not found):
            words = gettext("Nothing was changed: select one %(noun)s.") % {"noun": self.noun}
            self.message_user(request, words, messages.ERROR)
            return None
        return {key: found.get(key) for key in keys}

    def _carry_out_one(
        self, request: HttpRequest, alias: str, pk: Any, row: Any, action: Action, given: Given, done: str
    ) -> RowOutcome:
        if row is None:
            return RowOutcome(pk, gettext("number %(number)s") % {"number": pk}, gettext("it no longer exists"))
        subject = self.subject(row)
        if not self.permits(request, action, row):
            return RowOutcome(pk, subject, gettext("you do not have the permission for it"), is_error=True)
        try:
            with decision_transaction(alias):
                if action.run is not None and action.run(alias, pk, given):
                    self.log_change(request, row, f"{capfirst(done)}: {given.reason}" if given.reason else f"{capfirst(done)}.")
                    self.audit(request, alias, action.name, row)
                    return RowOutcome(pk, subject)
            now = self.get_queryset(request).using(alias).defer(*self.large_columns).filter(pk=pk).first()
            return RowOutcome(pk, subject, gettext("it no longer exists") if now is None else self.why_not(action, now, given))
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
                reasons = Counter(failure.unchanged for failure in failures).most_common()
                listed = "; ".join(f"{number(count)}: {reason}" for reason, count in reasons[: self.LINE_LIMIT])
                words = gettext("%(count)s not %(done)s. %(reasons)s.")
                counts = {"count": number(len(failures)), "done": done, "reasons": listed}
                self.message_user(request, words % counts, messages.WARNING)
            outcomes = failures[: self.LINE_LIMIT // 2]
        for outcome in outcomes:
            # The noun comes first, because the admin capitalises the first letter, and ids must be copied unchanged.
            if outcome.unchanged:
                level = messages.ERROR if outcome.is_error else messages.WARNING
                words = gettext("%(noun)s %(subject)s: not %(done)s: %(reason)s") % {
                    "noun": capfirst(self.noun),
                    "subject": outcome.name,
                    "done": done,
                    "reason": outcome.unchanged,
                }
                self.message_user(request, words, level)
            else:
                self.message_user(request, f"{capfirst(self.noun)} {outcome.name}: {done}", messages.SUCCESS)

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
