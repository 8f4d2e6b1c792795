"""The body of an HTTP request, of which no more is read than a limit allows."""

from http import HTTPStatus

from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpRequest, UnreadablePostError

from exactly_once.problems import Problem

_LONGEST_LENGTH = 18
"""Digits of a Content-Length."""


def read_body(request: HttpRequest, limit: int) -> bytes:
    """The body, of which at most one byte more than the limit is read.

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
    return body
