"""`manage.py check` for idempotent views."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.db import connections, router
from django.urls import get_resolver

from exactly_once.contrib.views.decorators import declared
from exactly_once.contrib.views.models import IdempotentRequest
from exactly_once.contrib.views.requests import by_user


@register()
def check_views(app_configs: object, **kwargs: Any) -> list[CheckMessage]:
    """exactly_once_views.E001: no such database. exactly_once_views.W001: the user is not known yet when the view begins."""
    # First, because it imports the views.
    early = [view.cls for view in _callbacks(get_resolver()) if _is_early(view)] if hasattr(settings, "ROOT_URLCONF") else []
    unfit = {alias: name for alias, name in declared.items() if not _has_table(alias)}
    return [
        *(
            Error(
                f"@idempotent_view has using={alias!r} (the first one decorates {name}), which is not in DATABASES, or where "
                "the database routers do not allow the app exactly_once_views.",
                hint=f"Use one of {', '.join(filter(_has_table, connections))}, or allow the app there.",
                id="exactly_once_views.E001",
            )
            for alias, name in unfit.items()
        ),
        *(
            Warning(
                f"@idempotent_view is outside of {view.__module__}.{view.__qualname__}, in which Django REST framework "
                "authenticates the user: a request with a token is answered with 403.",
                hint="Write it below @api_view, or apply it to a handler: method_decorator(idempotent_view, name='post').",
                id="exactly_once_views.W001",
            )
            for view in early
        ),
    ]


def _has_table(alias: str) -> bool:
    return alias in connections and router.allow_migrate_model(alias, IdempotentRequest)


def _callbacks(pattern: Any) -> Iterator[Any]:
    """The views of a resolver, or that of a pattern."""
    for inner in getattr(pattern, "url_patterns", ()):
        yield from _callbacks(inner)
    if callback := getattr(pattern, "callback", None):
        yield callback


def _is_early(view: Any) -> bool:
    is_rest = hasattr(getattr(view, "cls", None), "authentication_classes")
    return is_rest and getattr(getattr(view, "idempotency", None), "scope", None) is by_user
