"""What identifies a request: its key, whose key that is, and a fingerprint of all that the client has sent."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from http import HTTPStatus
from io import BytesIO
from typing import Any

from django.core.exceptions import RequestDataTooBig
from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest, QueryDict
from django.http.multipartparser import MultiPartParser
from django.utils.datastructures import MultiValueDict

from exactly_once.problems import Problem
from exactly_once.wire.text import NAME_LENGTH, fits

HEADER = "Idempotency-Key"


def by_user(request: Any) -> str:
    """The scope of an authenticated user: the default.

    Raises:
        Problem: the request is not authenticated, or its user has no primary key.
    """
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated or user.pk is None:
        detail = f"A request with the header {HEADER} must be authenticated, because a key is valid for one user."
        raise Problem(HTTPStatus.FORBIDDEN, f"{detail} If it is: write @idempotent_view below @api_view, or give it a scope.")
    return f"user:{user.pk}"


def by_token(request: Any) -> str:
    """The scope of a token: the digest of the header `Authorization`. For tokens that stay the same.

    Raises:
        Problem: the request does not have the header.
    """
    header = request.headers.get("Authorization", "")
    if not header:
        raise Problem(HTTPStatus.FORBIDDEN, f"A request with the header {HEADER} needs the header Authorization.")
    return f"token:{sha256(header.encode()).hexdigest()}"


def key_of(request: HttpRequest, *, required: bool) -> str | None:
    """The key in the header, in quotes as in the draft, or without; None if the request does not have the header.

    Raises:
        Problem: it is missing and required, or empty, too long, or not printable ASCII.
    """
    given = request.headers.get(HEADER)
    if given is None and not required:
        return None
    key = (given or "").strip()
    if len(key) > 1 and key[0] == key[-1] == '"':
        key = key[1:-1]
    if not key.strip() or not fits(key):
        detail = f"The header {HEADER} is required, with 1 to {NAME_LENGTH} printable characters of ASCII."
        raise Problem(HTTPStatus.BAD_REQUEST, f"{detail} Send a new UUID for each operation, and the same when it is repeated.")
    return key


def view_name(request: HttpRequest) -> str:
    """The name of the view, for operators."""
    match = request.resolver_match
    return (match.view_name if match else request.path)[:NAME_LENGTH]


def fingerprint(request: HttpRequest) -> str:
    """A digest of method, path and body: another request has another one.

    A client may choose another boundary for the parts of a repeated form, so their values count.

    Raises:
        Problem: the body is larger than DATA_UPLOAD_MAX_MEMORY_SIZE.
        RawPostDataException: other code has read the body as a stream. Let it use request.body.
    """
    try:
        body = _form(request) if request.content_type == "multipart/form-data" else [request.body]
    except RequestDataTooBig as error:
        raise Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body is too large: {error}") from error
    digest = sha256()
    for part in (f"{request.method} {request.get_full_path()}".encode(), *body):
        digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()


def _form(request: HttpRequest) -> list[bytes]:
    values: QueryDict = request.POST
    files: MultiValueDict[str, UploadedFile[Any]] = request.FILES
    if request.method != "POST" and not values and not files:
        # Django parses only what is posted. The body stays for the view to parse.
        parser = MultiPartParser(request.META, BytesIO(request.body), request.upload_handlers, request.encoding)
        values, files = parser.parse()
    return [repr(each).encode() for each in (*sorted(values.lists()), *_digests(files))]


def _digests(uploads: MultiValueDict[str, UploadedFile[Any]]) -> Iterator[tuple[str | None, ...]]:
    for name, files in sorted(uploads.lists()):
        for file in files:
            content = sha256()
            for chunk in file.chunks():
                content.update(chunk)
            file.seek(0)
            yield name, file.name, file.content_type, content.hexdigest()
