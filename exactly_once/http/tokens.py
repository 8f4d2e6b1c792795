"""Bearer tokens (RFC 6750): which client calls, and what it may do. Only the body of a known client is read, up to a limit."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpRequest, UnreadablePostError
from ninja.security.http import HttpAuthBase

from exactly_once.http.problems import Problem, forbidden, unauthorized
from exactly_once.http_options import Client, HttpOptions

_LONGEST_LENGTH = 18
"""Digits of a Content-Length."""


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
            _read_body(request, self._body_limit())
        return client


def client_of(request: HttpRequest) -> Client:
    """The client that `BearerToken` has found."""
    client = getattr(request, "auth", None)
    if not isinstance(client, Client):
        raise unauthorized()
    return client


def require(request: HttpRequest, action: str, name: str) -> Client:
    """The client, if it may do this with the topic or subscription.

    Raises:
        Problem: it may not.
    """
    client = client_of(request)
    if not client.may(name, action):
        raise forbidden(f"{action}:{name}")
    return client


def _read_body(request: HttpRequest, limit: int) -> None:
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
