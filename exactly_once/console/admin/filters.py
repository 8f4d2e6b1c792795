"""The filters of lists: by a condition or by a value, and those of messages.

Filters of messages whose columns have no index come last, and look at the newest messages only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.console.admin.html import app_name
from exactly_once.console.admin.message_search import newest
from exactly_once.console.admin.pages import counted
from exactly_once.console.display import duration, visible
from exactly_once.half import required
from exactly_once.packages import package_of, registered
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.heartbeat_table import HeartbeatTable
from exactly_once.wire.text import fit

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise as Text

Conditions = Mapping[str, tuple["Text", Q]]
FAILING = ("retrying", "dead")
MOST_OFFERED = 30
"""Values in a menu. A list can be filtered by any other in its URL."""


def is_shown(request: HttpRequest) -> bool:
    """Is the menu of a filter shown? An action on the list needs the chosen value only."""
    return request.method != "POST"


class ConditionFilter(admin.SimpleListFilter):
    """By one of several conditions.

    Attributes:
        fixed: the conditions by their value in the URL, each with its label.
        default: that of the first choice, without a value; None: no condition.
    """

    fixed: ClassVar[Conditions] = {}
    default: ClassVar[tuple[Text, Q] | None] = None

    def conditions(self, model_admin: Any) -> Conditions:
        return self.fixed

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, Any]]:
        self._conditions = self.conditions(model_admin)
        return [(value, label) for value, (label, _condition) in self._conditions.items()]

    def choices(self, changelist: Any) -> Iterator[Any]:
        first, *others = super().choices(changelist)
        yield {**first, "display": self.default[0]} if self.default else first
        yield from others

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        _label, condition = self._conditions.get(self.value() or "") or self.default or ("", Q())
        return queryset.filter(condition) if condition else queryset


class AppFilter(ConditionFilter):
    """By half; shown if both are installed."""

    title = _("app")
    parameter_name = "app"

    def conditions(self, model_admin: Any) -> Conditions:
        return {app: (app_name(app), Q(app=app)) for app in registered()}

    def has_output(self) -> bool:
        return len(self.lookup_choices) > 1


def in_states(states: Iterable[str]) -> Q:
    """In one of these states. As alternatives, because a partial index of one state is not used for `IN`."""
    return reduce(or_, (Q(state=state) for state in states))


class StateFilter(ConditionFilter):
    """By state, each with the number of its messages, up to the same limit as the list's."""

    title = _("state")
    parameter_name = "state"

    def conditions(self, model_admin: Any) -> Conditions:
        return {state: (label, Q(state=state)) for state, label in model_admin.opts.get_field("state").choices}

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, Any]]:
        states = super().lookups(request, model_admin)
        if not is_shown(request):
            return states
        counts = self.counts(request, model_admin)
        return [(state, f"{label} ({counts[state]})") for state, label in states]

    def counts(self, request: HttpRequest, model_admin: Any) -> Mapping[str, str]:
        rows = model_admin.get_queryset(request)
        return {state: counted(rows.filter(condition)) for state, (_label, condition) in self._conditions.items()}


class StuckFilter(ConditionFilter):
    """Messages that failed or are overdue."""

    title = _("stuck")
    parameter_name = "stuck"
    words: ClassVar[Any] = _("Dead, retrying or overdue")
    failing: ClassVar[Sequence[str]]

    def conditions(self, model_admin: Any) -> Conditions:
        after = model_admin.half.options().STUCK_AFTER
        overdue = self.overdue(DatabaseTime(-after))
        return {
            "any": (self.words, self.failed() | overdue),
            "overdue": (gettext("Overdue by %(time)s") % {"time": duration(after)}, overdue),
        }

    def overdue(self, before: DatabaseTime) -> Q:
        """Those that were due before this instant."""
        raise NotImplementedError

    def failed(self) -> Q:
        return in_states(self.failing)


class ValueFilter(admin.SimpleListFilter):
    """By the value of a column. The menu offers known values; the URL may have any other."""

    most: ClassVar[int] = MOST_OFFERED

    def known(self, model_admin: Any) -> Sequence[str]:
        raise NotImplementedError

    def of(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        return queryset.filter(**{str(self.parameter_name): value})

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        chosen = request.GET.get(self.parameter_name or "")
        names = list(self.known(model_admin)[: self.most]) if is_shown(request) else []
        if chosen and chosen not in names:
            names.append(chosen)
        return [(name, visible(name)) for name in names]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        return self.of(queryset, fit(value)) if value else queryset


class TopicFilter(ValueFilter):
    """By topic."""

    title = _("topic")
    parameter_name = "topic"

    def known(self, model_admin: Any) -> Sequence[str]:
        return list(model_admin.topics())


class ErrorClassFilter(ValueFilter):
    """By the class of the error, of messages that are retrying or dead."""

    title = _("error class")
    parameter_name = "error"

    def known(self, model_admin: Any) -> Sequence[str]:
        return required(model_admin.package).groups.classes(model_admin.using)

    def of(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        return queryset.filter(required(package_of(queryset.model)).groups.of_class(value))


class UnindexedFilter(admin.SimpleListFilter):
    """By a column without an index."""

    def __init__(self, request: HttpRequest, params: Any, model: Any, model_admin: Any) -> None:
        super().__init__(request, params, model, model_admin)
        self._page = model_admin

    def failing(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Those that are retrying or dead, which are few, unless the operator has chosen a state."""
        chosen = queryset if request.GET.get(StateFilter.parameter_name) else queryset.filter(in_states(FAILING))
        return newest(request, chosen, self._page.age_column)


class AgeFilter(UnindexedFilter, ConditionFilter):
    """By age, also of messages that are not settled yet."""

    title = _("age")
    parameter_name = "age"
    fixed: ClassVar[Any] = {
        "hour": (_("Last hour"), timedelta(hours=1)),
        "day": (_("Last 24 hours"), timedelta(days=1)),
        "open-hour": (_("Not settled for an hour"), timedelta(hours=1)),
        "open-day": (_("Not settled for a day"), timedelta(days=1)),
        "open-week": (_("Not settled for a week"), timedelta(days=7)),
    }

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value() or ""
        if value not in self.fixed:
            return queryset
        since = DatabaseTime(-self.fixed[value][1])
        age, born = self._page.age_column, self._page.born_column
        if value.startswith("open-"):
            unsettled = queryset.filter(self._page.unsettled)
            return newest(request, unsettled, age, oldest=True).filter(**{f"{born}__lt": since})
        return newest(request, queryset, age).filter(**{f"{born}__gte": since})


class AttemptsFilter(UnindexedFilter, ConditionFilter):
    """By the number of attempts."""

    title = _("attempts")
    parameter_name = "attempts"

    def conditions(self, model_admin: Any) -> Conditions:
        words = gettext("%(count)s and more")
        return {str(least): (words % {"count": least}, Q(attempts__gte=least)) for least in (1, 3, 5, 10)}

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return super().queryset(request, self.failing(request, queryset) if self.value() in self._conditions else queryset)


class HostFilter(UnindexedFilter, ValueFilter):
    """By the host of a failed attempt, as the trail has it."""

    title = _("host of a failed attempt")
    parameter_name = "host"

    def known(self, model_admin: Any) -> Sequence[str]:
        return sorted({process.host for process in HeartbeatTable(model_admin.package).known(model_admin.using)})

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        if not value:
            return queryset
        same = {name: OuterRef(name) for name in self._page.identity}
        entries: QuerySet[Any] = QuerySet(self._page.half.entries, using=queryset.db)
        attempts = entries.filter(**same, became__in=FAILING, process__startswith=f"{fit(value)}:")
        return self.failing(request, queryset).filter(Exists(attempts))
