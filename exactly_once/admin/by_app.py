"""The column and the filter by app of the pages that show rows of both halves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import apps
from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

APPS = ("outbox", "inbox")


def app_name(app: str) -> SafeString:
    """The name of a half, as the admin shows it."""
    return format_html("{}", next((config.verbose_name for config in apps.get_app_configs() if config.name == app), app))


class AppFilter(admin.SimpleListFilter):
    """By half; shown if both are installed."""

    title = _("app")
    parameter_name = "app"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        return [(app, app_name(app)) for app in APPS if apps.is_installed(app)]

    def has_output(self) -> bool:
        return len(self.lookup_choices) > 1

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(app=self.value()) if self.value() in APPS else queryset
