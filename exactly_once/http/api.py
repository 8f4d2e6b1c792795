"""An HTTP API: Django Ninja, with a bounded body, tokens, and every error as a problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any

from django.contrib.auth.decorators import login_not_required
from django.db import connections
from django.db.transaction import non_atomic_requests
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import URLPattern, re_path
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from ninja import NinjaAPI
from ninja.openapi.schema import OpenAPISchema

from exactly_once.http.problems import HANDLERS, ProblemDetails, as_problem, documented, unknown
from exactly_once.http.tokens import BearerToken
from exactly_once.http_options import HttpOptions

VERSION = "1"
_ALWAYS = (400, 401, 403, 411, 413, 422, 500, 503)
_View = Callable[..., Any]


class Api(NinjaAPI):
    """An API of one app.

    Args:
        name: namespace of its URLs.
        options: the option `HTTP` of the app.
        body_limit: maximum size of a request's body in bytes.
        answered: what answers further exceptions, by their class.
    """

    def __init__(
        self,
        *,
        name: str,
        title: str,
        description: str,
        options: Callable[[], HttpOptions],
        body_limit: Callable[[], int],
        answered: Mapping[type[Exception], Callable[..., Any]],
    ) -> None:
        super().__init__(
            title=title,
            version=VERSION,
            description=description,
            urls_namespace=name,
            auth=BearerToken(options, body_limit),
            docs_url=None,
        )
        for kind, answer in {**HANDLERS, **answered}.items():
            self.add_exception_handler(kind, answer)

    def get_openapi_schema(self, **given: Any) -> OpenAPISchema:
        """The OpenAPI document."""
        schema = super().get_openapi_schema(**given)
        for operations in schema["paths"].values():
            for operation in operations.values():
                documented(operation["responses"])
        return schema

    @property
    def patterns(self) -> list[URLPattern]:
        """For a URLconf whose `app_name` is the name of this API."""
        own = [pattern for pattern in self.urls[0] if isinstance(pattern, URLPattern)]
        for pattern in own:
            # Ninja's own view of the root raises Http404 outside of its handlers.
            pattern.callback = _guarded(unknown if pattern.name == "api-root" else pattern.callback)
        return [*own, re_path("", _guarded(unknown))]


def _guarded(view: _View) -> _View:
    """The view without a transaction, a session, a login or a CSRF token; the error of a wrong method is a problem, too."""

    @wraps(view, updated=())
    async def async_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        return as_problem(await view(request, *args, **kwargs))

    @wraps(view, updated=())
    def sync_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        return as_problem(view(request, *args, **kwargs))

    guarded: _View = async_view if iscoroutinefunction(view) else sync_view
    for alias in connections:
        guarded = non_atomic_requests(alias)(guarded)
    return never_cache(csrf_exempt(login_not_required(guarded)))


def answers(given: Mapping[int, type], *problems: int) -> dict[int, type]:
    """The answers of an operation for its documentation.

    Args:
        problems: statuses of errors that not every operation has.
    """
    return {**given, **dict.fromkeys(sorted({*_ALWAYS, *problems}), ProblemDetails)}
