"""An HTTP API: Django Ninja, with bearer tokens (RFC 6750), a bounded body, and every error as a problem.

A token says which client calls, and what it may do. Only the body of a known client is read, up to a limit.
"""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import wraps
from http import HTTPStatus
from inspect import iscoroutinefunction
from typing import Annotated, Any

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import URLPattern, re_path
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from ninja import NinjaAPI
from ninja.openapi.schema import OpenAPISchema
from ninja.security.http import HttpAuthBase
from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from exactly_once.bodies import read_body
from exactly_once.conf.app_options import Client, HttpOptions
from exactly_once.console.http import problems
from exactly_once.console.http.problems import ProblemDetails
from exactly_once.problems import Problem
from exactly_once.sql.connections import without_atomic_requests
from exactly_once.wire.durations import parse_duration
from exactly_once.wire.text import NAME_LENGTH

MAX_MESSAGES = 100
"""In one request or answer."""

VERSION = "1"
_ALWAYS = (400, 401, 403, 411, 413, 422, 500, 503)
_View = Callable[..., Any]
_LONGEST = timedelta(days=3650)


class BearerToken(HttpAuthBase):
    """Finds the client of a request by its token. Ninja's own class would log a header that it does not understand."""

    openapi_scheme = "bearer"

    def __init__(self, options: Callable[[], HttpOptions], body_limit: Callable[[], int]) -> None:
        super().__init__()
        self._options = options
        self._body_limit = body_limit

    def __call__(self, request: HttpRequest) -> Client | None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        client = self._options().client_of(token.strip()) if scheme.lower() == self.openapi_scheme else None
        if client is not None:
            request._body = read_body(request, self._body_limit())  # noqa: SLF001 - what `request.body` returns
        return client


def client_of(request: HttpRequest) -> Client:
    """The client that `BearerToken` has found."""
    client = getattr(request, "auth", None)
    if not isinstance(client, Client):
        raise problems.unauthorized()
    return client


def require(request: HttpRequest, action: str, name: str) -> Client:
    """The client, if it may do this with the topic or subscription.

    Raises:
        Problem: it may not.
    """
    client = client_of(request)
    if not client.may(name, action):
        scope, headers = f"{action}:{name}", {"WWW-Authenticate": 'Bearer error="insufficient_scope"'}
        raise Problem(HTTPStatus.FORBIDDEN, f"The token does not have the scope {scope}.", headers=headers, scope=scope)
    return client


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
        for kind, answer in {**problems.HANDLERS, **answered}.items():
            self.add_exception_handler(kind, answer)

    def get_openapi_schema(self, **given: Any) -> OpenAPISchema:
        """The OpenAPI document."""
        schema = super().get_openapi_schema(**given)
        for operations in schema["paths"].values():
            for operation in operations.values():
                problems.documented(operation["responses"])
        return schema

    @property
    def patterns(self) -> list[URLPattern]:
        """For a URLconf whose `app_name` is the name of this API."""
        own = [pattern for pattern in self.urls[0] if isinstance(pattern, URLPattern)]
        for pattern in own:
            # Ninja's own view of the root raises Http404 outside of its handlers.
            pattern.callback = _guarded(problems.unknown if pattern.name == "api-root" else pattern.callback)
        return [*own, re_path("", _guarded(problems.unknown))]


def _guarded(view: _View) -> _View:
    """The view without a transaction, a session, a login or a CSRF token; the error of a wrong method is a problem, too."""

    @wraps(view, updated=())
    async def async_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        return problems.as_problem(await view(request, *args, **kwargs))

    @wraps(view, updated=())
    def sync_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        return problems.as_problem(view(request, *args, **kwargs))

    guarded: _View = without_atomic_requests(async_view if iscoroutinefunction(view) else sync_view)
    return never_cache(csrf_exempt(login_not_required(guarded)))


def answers(given: Mapping[int, type], *problems: int) -> dict[int, type]:
    """The answers of an operation for its documentation.

    Args:
        problems: statuses of errors that not every operation has.
    """
    return {**given, **dict.fromkeys(sorted({*_ALWAYS, *problems}), ProblemDetails)}


# ------------------------------------------------------------------------------------------------------ fields of bodies


def _instant(value: object) -> datetime:
    if not isinstance(value, str):
        raise ValueError("it must be text, such as 2026-01-31T12:00:00Z")  # noqa: TRY004 - Pydantic's own protocol
    return datetime.fromisoformat(value)


def _duration(value: object) -> timedelta:
    if isinstance(value, str):
        return parse_duration("it", value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LONGEST.total_seconds():
        raise ValueError("it must be a number of seconds, or text such as 90s")
    return timedelta(seconds=value)


class Body(BaseModel):
    """The body of a request. An unknown field is an error.

    Unlike Pydantic by default, these fields do not turn a text into a number, or a number into an instant.
    """

    model_config = ConfigDict(extra="forbid")


Name = Annotated[str, Field(min_length=1, max_length=NAME_LENGTH)]
"""A topic, key or biz-id; also at most 255 bytes in UTF-8."""
Instant = Annotated[AwareDatetime, BeforeValidator(_instant)]
Duration = Annotated[
    timedelta,
    BeforeValidator(_duration),
    Field(ge=timedelta(), le=_LONGEST),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum": _LONGEST.total_seconds(), "description": "Seconds."},
                {"type": "string", "pattern": "^(0|[1-9][0-9]{0,4})[smhd]$"},
            ]
        }
    ),
]
"""A number of seconds, or text such as "90s"."""
Count = Annotated[int, Field(strict=True, ge=1)]
Flag = Annotated[bool, Field(strict=True)]
