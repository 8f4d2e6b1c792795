"""What identifies a request: its key, whose key that is, and a fingerprint of all that the client has sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256
from http import HTTPStatus
from io import BytesIO
from typing import Any

from django.core.exceptions import RequestDataTooBig
from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest
from django.http.multipartparser import MultiPartParser
from django.http.request import RawPostDataException, split_domain_port
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
    kind: Any = user.__class__  # of the user, if `user` is lazy
    name = user._meta.concrete_model._meta.label_lower if hasattr(user, "_meta") else f"{kind.__module__}.{kind.__qualname__}"
    return f"user:{name}:{user.pk}"


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


def fingerprint(request: Any, http: HttpRequest) -> str:
    """A digest of method, host, path and body: another request has another one.

    A client may choose another boundary for the parts of a repeated form, so their values count, unless the body was read.

    Args:
        request: what the view gets, `http` or that of Django REST framework around it.

    Raises:
        Problem: the body is larger than DATA_UPLOAD_MAX_MEMORY_SIZE.
        RawPostDataException: other code has read the body as a stream.
        rest_framework.exceptions.APIException: its parsers refuse the body.
    """
    try:
        body = _body(request, http)
    except RequestDataTooBig as error:
        raise Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body is too large: {error}") from error
    except RawPostDataException as error:
        what = f"The body of a request to {view_name(http)} was read as a stream before @idempotent_view"
        raise RawPostDataException(f"{what}: let middleware and decorators read request.body.") from error
    # Not the port, which is that of one server process.
    host, digest = split_domain_port(http.get_host())[0], sha256()
    for part in (f"{http.method} {host} {http.get_full_path()}".encode(), *body):
        digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()


def _body(request: Any, http: Any) -> list[bytes]:
    is_form, was_read = http.content_type == "multipart/form-data", http._read_started  # noqa: SLF001 - DRF reads it, too
    if not hasattr(http, "_body"):
        if request is not http and (is_form or was_read):  # the parsers of the view read the stream, once
            return _values(request.POST if is_form else request.data, request.FILES)
        if is_form and (hasattr(http, "_post") if was_read else http.method == "POST"):
            return _values(http.POST, http.FILES)
        if is_form:  # Django parses only what is posted. The body stays for the view to parse.
            return _values(*MultiPartParser(http.META, BytesIO(http.body), http.upload_handlers, http.encoding).parse())
    return [http.body]


def _values(values: Any, uploads: Any) -> list[bytes]:
    listed = sorted(values.lists()) if isinstance(values, MultiValueDict) else [values]
    files = uploads.lists() if isinstance(uploads, MultiValueDict) else ((name, [file]) for name, file in uploads.items())
    return [repr(each).encode() for each in (*listed, *_digests(sorted(files)))]


def _digests(uploads: Iterable[tuple[str, list[UploadedFile[Any]]]]) -> Iterator[tuple[str | None, ...]]:
    for name, files in uploads:
        for file in files:
            content = sha256()
            for chunk in file.chunks():
                content.update(chunk)
            file.seek(0)
            yield name, file.name, file.content_type, content.hexdigest()
