"""Filters whose choices are conditions, declared as data; and the column and the filter by app."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from django.apps import apps
from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from exactly_once.display import app_name

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise as Text

APPS = ("outbox", "inbox")
Conditions = Mapping[str, tuple["Text", Q]]


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
        return {app: (app_name(app), Q(app=app)) for app in APPS if apps.is_installed(app)}

    def has_output(self) -> bool:
        return len(self.lookup_choices) > 1
