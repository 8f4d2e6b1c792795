"""What identifies a request: its key, whose key that is, and a fingerprint of all that the client has sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256
from http import HTTPStatus
from typing import Any

from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest
from django.http.request import RawPostDataException

from exactly_once.problems import Problem
from exactly_once.wire.text import NAME_LENGTH, fits

HEADER = "Idempotency-Key"
_MULTIPART = "multipart/form-data"
_ADVICE = "Send a new UUID for each operation, and the same one when it is repeated."


def django_request(request: Any) -> HttpRequest:
    """The request of Django, also inside of Django REST framework, which has another one around it."""
    found: HttpRequest = getattr(request, "_request", request)
    return found


def by_user(request: Any) -> str:
    """The scope of an authenticated user: the default.

    Raises:
        Problem: the request is not authenticated.
    """
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        raise Problem(
            HTTPStatus.FORBIDDEN,
            f"A request with the header {HEADER} must be authenticated, because a key is valid for one user. A view that finds "
            "its clients in another way has the argument scope.",
        )
    return f"user:{user.pk}"


def by_token(request: Any) -> str:
    """The scope of a token: the digest of the header `Authorization`. For tokens that stay the same.

    Raises:
        Problem: the request does not have the header.
    """
    header = django_request(request).headers.get("Authorization", "")
    if not header:
        raise Problem(HTTPStatus.FORBIDDEN, f"A request with the header {HEADER} needs the header Authorization.")
    return f"token:{sha256(header.encode()).hexdigest()}"


def key_of(request: Any, *, required: bool) -> str | None:
    """The key in the header, in quotes as in the draft, or without; None if the request does not have the header.

    Raises:
        Problem: it is missing and required, or empty, too long, or not printable ASCII.
    """
    given: str | None = django_request(request).headers.get(HEADER)
    if given is None:
        if required:
            raise Problem(HTTPStatus.BAD_REQUEST, f"The header {HEADER} is required. {_ADVICE}")
        return None
    key = given.strip()
    if len(key) > 1 and key[0] == key[-1] == '"':
        key = key[1:-1]
    if not key.strip() or not fits(key):
        detail = f"The {HEADER} must have 1 to {NAME_LENGTH} printable characters of ASCII. {_ADVICE}"
        raise Problem(HTTPStatus.BAD_REQUEST, detail)
    return key


def scope_name(scope: str) -> str:
    """The scope as its column has it: a digest of one that does not fit."""
    return scope if fits(scope) else f"sha256:{sha256(scope.encode()).hexdigest()}"


def view_name(request: Any) -> str:
    """The name of the view, for operators."""
    match = django_request(request).resolver_match
    return (match.view_name if match else request.path)[:NAME_LENGTH]


def fingerprint(request: Any) -> str:
    """A digest of method, path and body: another request has another one.

    A client may choose another boundary for the parts of a repeated form, so their values count.

    Raises:
        Problem: the body is larger than DATA_UPLOAD_MAX_MEMORY_SIZE.
        RuntimeError: other code has read the body, and has not kept it.
    """
    http = django_request(request)
    digest = sha256()
    for part in (f"{http.method} {http.get_full_path()}".encode(), *_body(http)):
        digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()


def _body(http: HttpRequest) -> Iterable[bytes]:
    if http.content_type == _MULTIPART:
        return _form(http)
    try:
        return [http.body]
    except RequestDataTooBig as error:
        raise Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body is too large: {error}") from error
    except RawPostDataException as error:
        raise RuntimeError(
            "@idempotent_view needs the body of the request, which was read as a stream before. Let that code use request.body."
        ) from error


def _form(http: HttpRequest) -> Iterator[bytes]:
    for name, values in sorted(http.POST.lists()):
        yield repr((name, values)).encode()
    for name, files in sorted(http.FILES.lists()):
        for file in files:
            content = sha256()
            for chunk in file.chunks():
                content.update(chunk)
            file.seek(0)
            yield repr((name, file.name, file.content_type, content.hexdigest())).encode()
