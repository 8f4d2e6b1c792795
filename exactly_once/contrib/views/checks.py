"""`manage.py check` for idempotent views."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.db import connections
from django.urls import URLPattern, URLResolver, get_resolver

from exactly_once.contrib.views.decorators import declared
from exactly_once.contrib.views.requests import by_user


@register()
def check_databases(app_configs: object, **kwargs: Any) -> list[CheckMessage]:
    """exactly_once_views.E001: the database of a view does not exist."""
    _callbacks()  # which imports the views
    return [
        Error(
            f"@idempotent_view has using={alias!r} (the first one decorates {name}), and DATABASES has no {alias!r}.",
            hint=f"Use one of {', '.join(connections)}.",
            id="exactly_once_views.E001",
        )
        for alias, name in declared.items()
        if alias not in connections
    ]


@register()
def check_order(app_configs: object, **kwargs: Any) -> list[CheckMessage]:
    """exactly_once_views.W001: the user is not known yet when the key is looked up."""
    return [
        Warning(
            f"{view.cls.__module__}.{view.cls.__qualname__} is decorated with @idempotent_view outside of Django REST "
            "framework, which authenticates its users inside: every request with a token is answered with 403.",
            hint="Write it below @api_view, or apply it to a handler: method_decorator(idempotent_view, name='post').",
            id="exactly_once_views.W001",
        )
        for view in _callbacks()
        if hasattr(getattr(view, "cls", None), "authentication_classes")
        and getattr(getattr(view, "idempotency", None), "scope", None) is by_user
    ]


def _callbacks() -> list[Any]:
    return [*_within(get_resolver().url_patterns)] if getattr(settings, "ROOT_URLCONF", "") else []


def _within(patterns: list[Any]) -> Iterator[Any]:
    for pattern in patterns:
        if isinstance(pattern, URLResolver):
            yield from _within(pattern.url_patterns)
        elif isinstance(pattern, URLPattern):
            yield pattern.callback
