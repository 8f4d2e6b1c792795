"""Errors as problem details (RFC 9457): every answer of 400 and above is `application/problem+json`."""

from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any

from django.core.signals import got_request_exception
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from ninja.errors import AuthenticationError, HttpError, ValidationError
from pydantic import BaseModel, ConfigDict, Field

from exactly_once.problems import CONTENT_TYPE, RETRY_AFTER, Problem
from exactly_once.process.logs import escaping_logger
from exactly_once.wire.text import NAME_LENGTH, describe, printable

logger = escaping_logger(__name__)

_MOST_ERRORS = 20
"""How many wrong fields an answer names. Without a limit it could be a hundred times as large as the request."""


class ProblemDetails(BaseModel):
    """An error. Further members depend on it."""

    model_config = ConfigDict(extra="allow")

    title: str = Field(description="The meaning of the status.")
    status: int
    detail: str = Field(description="What is wrong with this request, and what to do.")


def unauthorized() -> Problem:
    return Problem(
        HTTPStatus.UNAUTHORIZED,
        "A valid token is required: send it in the header Authorization: Bearer <token>.",
        headers={"WWW-Authenticate": "Bearer"},
    )


def with_status(status: HTTPStatus) -> Callable[[HttpRequest, Exception], HttpResponse]:
    """Answers an exception with this status and its text, which is meant for the client."""
    return lambda request, error: Problem(status, str(error)).response


def as_problem(response: HttpResponseBase) -> HttpResponseBase:
    """An error that is not a problem yet, such as that of a wrong method, as one."""
    if response.status_code < HTTPStatus.BAD_REQUEST or response.headers.get("Content-Type") == CONTENT_TYPE:
        return response
    status = HTTPStatus(response.status_code)
    headers = {name: value for name, value in response.headers.items() if name == "Allow"}
    allowed = f": use {headers['Allow']}" if headers else ""
    return Problem(status, f"{status.phrase}{allowed}.", headers=headers).response


def _of_body(request: HttpRequest, error: ValidationError) -> HttpResponse:
    errors = [{"field": _field(one["loc"]), "detail": one["msg"]} for one in error.errors[:_MOST_ERRORS]]
    detail = "; ".join(f"{one['field']}: {one['detail']}" for one in errors)
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, detail, errors=errors).response


def _field(path: Iterable[str | int]) -> str:
    # The client has chosen the names in a mapping.
    return printable(".".join(map(str, path)), NAME_LENGTH)


def _of_ninja(request: HttpRequest, error: HttpError) -> HttpResponse:
    status = HTTPStatus(error.status_code)
    return Problem(status, "The body is not JSON." if status is HTTPStatus.BAD_REQUEST else str(error)).response


def unknown(request: HttpRequest, error: Exception | None = None) -> HttpResponse:
    """The answer to a path that is none of the API."""
    return Problem(HTTPStatus.NOT_FOUND, f"There is no {request.path}.").response


def unavailable(request: HttpRequest, error: Exception) -> HttpResponse:
    """The answer while the database does not answer, or another transaction has a lock."""
    logger.warning("http: %s %s is answered with 503: %s", request.method, request.path, describe(error))
    detail = "The database is unavailable, or locked by other transactions. Repeat the request later."
    return Problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, headers=RETRY_AFTER).response


def _unexpected(request: HttpRequest, error: Exception) -> HttpResponse:
    logger.error("http: unexpected error in %s %s, which is answered with 500", request.method, request.path, exc_info=error)
    got_request_exception.send(sender=None, request=request)
    detail = "An unexpected error occurred. It is in the log of the service."
    return Problem(HTTPStatus.INTERNAL_SERVER_ERROR, detail).response


HANDLERS: Mapping[type[Exception], Callable[[HttpRequest, Any], HttpResponse]] = {
    Exception: _unexpected,
    Problem: lambda request, error: error.response,
    ValidationError: _of_body,
    HttpError: _of_ninja,
    AuthenticationError: lambda request, error: unauthorized().response,
    Http404: unknown,
    OperationalError: unavailable,
    InterfaceError: unavailable,
}
"""What answers an exception of a view."""


def documented(responses: dict[Any, Any]) -> None:
    """In an OpenAPI operation, give the answers of 400 and above the content type of problems."""
    for status, response in responses.items():
        if int(status) >= HTTPStatus.BAD_REQUEST:
            response["content"] = {CONTENT_TYPE: next(iter(response["content"].values()))}
