"""`manage.py check` for idempotent views."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, register
from django.db import connections, router

from exactly_once.contrib.views.decorators import declared
from exactly_once.contrib.views.models import IdempotentRequest


@register()
def check_views(app_configs: object, **kwargs: Any) -> list[CheckMessage]:
    """exactly_once_views.E001: no such database."""
    if hasattr(settings, "ROOT_URLCONF"):
        import_module(settings.ROOT_URLCONF)  # it imports the views
    return [
        Error(
            f"@idempotent_view or outbox.contrib.http uses the database {alias!r}, which is not in DATABASES, or where the "
            "database routers do not allow the app exactly_once_views.",
            hint=f"Use one of {', '.join(filter(_has_table, connections))}, or allow the app there.",
            id="exactly_once_views.E001",
        )
        for alias in sorted(declared)
        if not _has_table(alias)
    ]


def _has_table(alias: str) -> bool:
    return alias in connections and router.allow_migrate_model(alias, IdempotentRequest)
