"""Bearer tokens (RFC 6750): which client calls, and what it may do."""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest
from ninja.security.http import HttpAuthBase

from exactly_once.http.problems import forbidden, unauthorized
from exactly_once.http_options import Client, HttpOptions


class BearerToken(HttpAuthBase):
    """Finds the client of a request by its token. Ninja's own class would log a header that it does not understand."""

    openapi_scheme = "bearer"

    def __init__(self, options: Callable[[], HttpOptions]) -> None:
        super().__init__()
        self._options = options

    def __call__(self, request: HttpRequest) -> Client | None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        return self._options().client_of(token.strip()) if scheme.lower() == self.openapi_scheme else None


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
