"""An HTTP API: Django Ninja, with a bounded body, tokens, and every error as a problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from http import HTTPStatus
from inspect import iscoroutinefunction
from typing import Any

from django.contrib.auth.decorators import login_not_required
from django.core.handlers.wsgi import WSGIRequest
from django.db import connections
from django.db.transaction import non_atomic_requests
from django.http import Http404, HttpRequest, UnreadablePostError
from django.http.response import HttpResponseBase
from django.urls import URLPattern, re_path
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from ninja import NinjaAPI
from ninja.openapi.schema import OpenAPISchema

from exactly_once.http.problems import Problem, ProblemDetails, as_problem, documented, problem_of
from exactly_once.http.tokens import BearerToken
from exactly_once.http_options import HttpOptions

VERSION = "1"
_ALWAYS = (400, 401, 403, 411, 413, 422, 500, 503)
_LONGEST_LENGTH = 18
"""Digits of a Content-Length."""
_View = Callable[..., Any]


class Api(NinjaAPI):
    """An API of one app.

    Args:
        name: namespace of its URLs.
        options: the option `HTTP` of the app.
        body_limit: maximum size of a request's body in bytes.
        statuses: of exceptions, see `problem_of`.
    """

    def __init__(
        self,
        *,
        name: str,
        title: str,
        description: str,
        options: Callable[[], HttpOptions],
        body_limit: Callable[[], int],
        statuses: Mapping[type[Exception], HTTPStatus],
    ) -> None:
        self._token = BearerToken(options)
        super().__init__(
            title=title,
            version=VERSION,
            description=description,
            urls_namespace=name,
            auth=self._token,
            docs_url=None,
        )
        self._body_limit = body_limit
        self._statuses = statuses

    def on_exception(self, request: HttpRequest, exc: Any) -> Any:
        """The answer to an exception of a view."""
        return problem_of(request, exc, self._statuses).response

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
            pattern.callback = self._guarded(pattern.callback)
        return [*own, re_path("", self._guarded(_unknown))]

    def _read_body(self, request: HttpRequest) -> None:
        # Anyone can send a body; without a token it would only take memory.
        if self._token(request) is None:
            request._body = b""  # noqa: SLF001 - see `_bound_body`
        else:
            _bound_body(request, self._body_limit())

    def _guarded(self, view: _View) -> _View:
        """The view with a bounded body, without a transaction, a session, a login or a CSRF token."""

        def answered(request: HttpRequest, error: Exception) -> HttpResponseBase:
            return problem_of(request, error, self._statuses).response

        @wraps(view, updated=())
        async def async_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            try:
                self._read_body(request)
                return as_problem(await view(request, *args, **kwargs))
            except Exception as error:  # noqa: BLE001 - problem_of() logs it
                return answered(request, error)

        @wraps(view, updated=())
        def sync_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            try:
                self._read_body(request)
                return as_problem(view(request, *args, **kwargs))
            except Exception as error:  # noqa: BLE001 - problem_of() logs it
                return answered(request, error)

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


def _unknown(request: HttpRequest) -> HttpResponseBase:
    raise Http404


def _bound_body(request: HttpRequest, limit: int) -> None:
    """Read the body, of which at most one byte more than the limit is read.

    Raises:
        Problem: it is larger than the limit or of unknown length, or the client has closed the connection.
    """
    announced = request.headers.get("Content-Length", "")
    if not announced and "Transfer-Encoding" in request.headers and isinstance(request, WSGIRequest):
        raise Problem(
            HTTPStatus.LENGTH_REQUIRED,
            "The body has no Content-Length, without which it cannot be read under WSGI: do not send it in chunks.",
        )
    # A length of thousands of digits cannot be converted.
    is_too_long = announced.isdecimal() and (len(announced) > _LONGEST_LENGTH or int(announced) > limit)
    try:
        body = b"" if is_too_long else bytes(request.read(limit + 1))
    except UnreadablePostError:
        raise Problem(HTTPStatus.BAD_REQUEST, "The connection was closed before the body was complete.") from None
    if is_too_long or len(body) > limit:
        raise Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body is larger than {limit} bytes.", limit_bytes=limit)
    request._body = body  # noqa: SLF001 - what was read is what `request.body` returns
